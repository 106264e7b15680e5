"""What the operator's process loads: a library that only something else needs costs every installation its memory."""

from __future__ import annotations

import os
import subprocess
import sys

HEAVY = ("google", "kubernetes", "requests", "oauthlib", "numpy", "pandas", "matplotlib", "tensorflow")
LOADED_MIB = 78
"""67 on Linux with Python 3.11. With the official client it were 80."""

SCRIPT = f"""
import sys
import shoal.process.main
print([name for name in {HEAVY!r} if name in sys.modules])
status = open('/proc/self/status').read()
print(int(status.partition('VmRSS:')[2].split()[0]) / 1024)
"""


def test_operator_loads_no_library_that_it_does_not_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60, env=os.environ
    )
    loaded, mib = done.stdout.splitlines()
    assert loaded == "[]"
    assert float(mib) < LOADED_MIB
