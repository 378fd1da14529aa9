"""The rules that no linter knows: sizes, docstrings, who may import and read what.

A rule takes one source file and yields `(line, message)` for every violation.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

# Functions with more parameters, each with its reason.
MANY_PARAMETERS = {
    "ContextParallelBase.__init__",  # the user's options: all of them keyword-only and optional
    "attend",  # what one call may ask for: as well
    "forward_implementation",  # an operator's schema: plain tensors, numbers and names
    "backward_implementation",
}
# fsdp is nothing but a use of torch.distributed.fsdp.
MAY_USE_DISTRIBUTED = (
    "compat",
    "mesh",
    "comm",
    "fsdp",
    "gathers",
    "gradients",  # parts of DTensors, and their sums
    "materialize",
    "swap/shared",
    "plugin",
    "cli",
    "diagnostics/trace",
)
MAY_USE_LIGHTNING = ("plugin", "cli")
MAY_READ_ENVIRONMENT = ("plugin", "cli")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionNode | ast.ClassDef
Found = Iterator[tuple[int, str]]


class Source(NamedTuple):
    """One file: its path within the package, its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module


class Scope(NamedTuple):
    """A definition outside function bodies, with its dotted name and the class around it."""

    name: str
    node: Definition
    parent: ast.ClassDef | None


def parse(path: str, text: str) -> Source:
    """A source of the path that the rules are to see."""
    return Source(path, text, ast.parse(text))


def lives_in(path: str, places: tuple[str, ...]) -> bool:
    """Whether a file is one of some modules, or in one of some folders."""
    return any(path == f"{place}.py" or path.startswith(f"{place}/") for place in places)


def definitions(
    body: list[ast.stmt], prefix: str = "", parent: ast.ClassDef | None = None
) -> Iterator[Scope]:
    """Functions and classes of a module, and those of its classes, with all names before theirs."""
    for node in body:
        if isinstance(node, Definition):
            name = f"{prefix}{node.name}"
            yield Scope(name, node, parent)
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{name}.", node)


def last_name(node: ast.expr) -> str:
    """`b` of `b`, `a.b`, `a.b(...)` and `a.b[...]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def decorated(node: Definition, *names: str) -> bool:
    """Whether a decorator has one of some names, wherever it comes from."""
    return any(last_name(decorator) in names for decorator in node.decorator_list)


def imported(tree: ast.Module) -> Found:
    """Line and dotted name of everything imported, and of every use of `torch.distributed`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def short_file(source: Source) -> Found:
    """At most 400 lines."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield 1, f"{lines} lines; a file has at most {MAX_FILE_LINES}: split it by what it is about"


def short_functions(source: Source) -> Found:
    """At most 60 lines in a function."""
    for node in ast.walk(source.tree):
        if isinstance(node, FunctionNode):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield (
                    node.lineno,
                    f"{node.name} has {lines} lines; a function has at most {MAX_FUNCTION_LINES}",
                )


def few_parameters(source: Source) -> Found:
    """At most 8 parameters; those of an overridden method are not ours to choose."""
    for scope in definitions(source.tree.body):
        if not isinstance(scope.node, FunctionNode) or decorated(scope.node, "override"):
            continue
        args = scope.node.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
        count = sum(name not in ("self", "cls") for name in names)
        if count > MAX_PARAMETERS and scope.name not in MANY_PARAMETERS:
            yield (
                scope.node.lineno,
                f"{scope.name} takes {count} parameters, at most {MAX_PARAMETERS}: "
                f"pass a value that holds several of them",
            )


def docstrings(source: Source) -> Found:
    """A docstring in every module, and on everything public outside of function bodies."""
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring"
    for name, node, parent in definitions(source.tree.body):
        private = any(part.startswith("_") for part in name.split("."))
        inherited = decorated(node, "override", "overload", "setter")
        protocol = parent is not None and any(last_name(b) == "Protocol" for b in parent.bases)
        stub = protocol and isinstance(node, FunctionNode) and ast.unparse(node.body[-1]) == "..."
        if not (private or inherited or stub or ast.get_docstring(node)):
            yield node.lineno, f"{name} is public and has no docstring"


def no_globals(source: Source) -> Found:
    """No `global` statement."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield (
                node.lineno,
                f"`global {', '.join(node.names)}`: pass the value, or give it an owner",
            )


def no_environment(source: Source) -> Found:
    """The environment is read where the user meets us, and nowhere else."""
    if lives_in(source.path, MAY_READ_ENVIRONMENT):
        return
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv")
    uses = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
    ]
    for line, name in (*imported(source.tree), *uses):
        if name in names:
            yield line, f"{name} outside {' and '.join(MAY_READ_ENVIRONMENT)}: take an argument"


def assert_invariants(source: Source) -> Found:
    """Each assert has a comment that names its invariant."""
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            near = range(node.lineno - 1, (node.end_lineno or node.lineno) + 1)
            if not any(comments.get(line, "").startswith("invariant:") for line in near):
                yield (
                    node.lineno,
                    "assert without a comment `# invariant: ...` on its line or the line before; "
                    "what a user can cause is an exception of errors.py",
                )


def no_swallowing(source: Source) -> Found:
    """A broad `except` raises."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(
            kind is None or last_name(kind) in ("Exception", "BaseException") for kind in kinds
        )
        raises = any(isinstance(inner, ast.Raise) for stmt in node.body for inner in ast.walk(stmt))
        if broad and not raises:
            yield (
                node.lineno,
                "a broad `except` that does not raise hides faults: name the exception",
            )


def distributed_below_comm(source: Source) -> Found:
    """Few modules use torch.distributed."""
    if lives_in(source.path, MAY_USE_DISTRIBUTED):
        return
    for line, name in imported(source.tree):
        if f"{name}.".startswith("torch.distributed."):
            yield line, f"torch.distributed outside {', '.join(MAY_USE_DISTRIBUTED)}"


def lightning_on_top(source: Source) -> Found:
    """Lightning is imported where the strategy is, and nowhere else."""
    if lives_in(source.path, MAY_USE_LIGHTNING):
        return
    for line, name in imported(source.tree):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            yield line, f"{name} imported outside {' and '.join(MAY_USE_LIGHTNING)}"


def coded_ignores(source: Source) -> Found:
    """A `type: ignore` has a code."""
    for line, text in enumerate(source.text.splitlines(), 1):
        if re.search(r"#\s*type:\s*ignore(?!\[)", text):
            yield line, "`type: ignore` without a code: write `type: ignore[code]`"


def no_todos(source: Source) -> Found:
    """Nothing is left for later."""
    for line, text in enumerate(source.text.splitlines(), 1):
        for word in re.findall(r"\b(?:TODO|FIXME|XXX)\b", text):
            yield line, f"{word}: do it now, or file an issue"


def ascii_only(source: Source) -> Found:
    """Source is ASCII."""
    for line, text in enumerate(source.text.splitlines(), 1):
        if not text.isascii():
            odd = next(char for char in text if not char.isascii())
            yield line, f"U+{ord(odd):04X} is not ASCII: spell it out"


Rule = Callable[[Source], Found]

RULES: tuple[Rule, ...] = (
    short_file,
    short_functions,
    few_parameters,
    docstrings,
    no_globals,
    no_environment,
    assert_invariants,
    no_swallowing,
    distributed_below_comm,
    lightning_on_top,
    coded_ignores,
    no_todos,
    ascii_only,
)
