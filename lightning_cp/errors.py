"""The exceptions of the package.

```
ContextParallelError
    ConfigError      (also a ValueError)    an option or a size that cannot work
    BatchError       (also a ValueError)    a batch that cannot be cut along the sequence
    RefusedError     (also a RuntimeError)  a call inside a step that would be wrong on shards
    MismatchError    (also a RuntimeError)  ranks of one group disagree
    PeerError        (also a RuntimeError)  another rank failed, or did not answer in time
    CheckpointError  (also a RuntimeError)  a checkpoint that could not be written or read
    VerificationError  (also a RuntimeError)  a step that differs with context parallelism
    NonFiniteGradientError  (also a RuntimeError)  a norm of gradients that is infinite or NaN

ContextParallelWarning  (a UserWarning)     a step that is probably not what its author means
```

Every message says the number, the rule and the way out.
"""


class ContextParallelError(Exception):
    """Base class of everything this package raises on purpose."""


class ConfigError(ContextParallelError, ValueError):
    """An option or a size that cannot work."""


class BatchError(ContextParallelError, ValueError):
    """A batch that cannot be cut along the sequence."""


class RefusedError(ContextParallelError, RuntimeError):
    """A call inside a step whose result would be wrong on a shard of the sequence."""


class MismatchError(ContextParallelError, RuntimeError):
    """Ranks of one context-parallel group disagree about what they must share."""


class PeerError(ContextParallelError, RuntimeError):
    """Another rank failed or did not answer in time."""


class CheckpointError(ContextParallelError, RuntimeError):
    """A checkpoint that could not be written or read."""


class VerificationError(ContextParallelError, RuntimeError):
    """A step whose outcome with context parallelism is not that of one device."""


class NonFiniteGradientError(ContextParallelError, RuntimeError):
    """The norm of the gradients is infinite or NaN, and the caller asked not to go on then."""


class ContextParallelWarning(UserWarning):
    """Something in a step that is probably not what its author means under context parallelism."""
