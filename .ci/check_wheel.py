"""Checks what a wheel holds: the package, the module torch loads, metadata, nothing else."""

import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
AUTOLOAD = "_lightning_cp_autoload.py"
stray = [
    name
    for name in names
    if name.split("/")[0] not in ("lightning_cp", AUTOLOAD)
    and not name.split("/")[0].endswith(".dist-info")
]
missing = [
    end
    for end in (
        "lightning_cp/py.typed",
        "lightning_cp/cli/bench/balance/lengths.json",
        AUTOLOAD,
        ".dist-info/licenses/LICENSE",
        ".dist-info/entry_points.txt",
    )
    if not any(name.endswith(end) for name in names)
]
if stray or missing:
    sys.exit(f"the wheel holds {stray} beside the package, and lacks {missing}")
print(f"{len(names)} files, all in place")
