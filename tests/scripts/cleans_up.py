"""Runs a script, catches its errors and cleans up after it: ``cleans_up.py SCRIPT ...``."""

import atexit
import runpy
import sys
import tempfile

del sys.argv[0]
atexit.register(sys.stdout.write, "at exit\n")
try:
    with tempfile.TemporaryDirectory():
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception as error:
            print(f"swallowed {error!r}", flush=True)
finally:
    print("cleaned up", flush=True)
