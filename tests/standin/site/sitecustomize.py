"""Read by every Python that starts over the stand-in GPU, so by child processes too: with
STANDIN_MODE=numbers the mode of `numbers_mode.py` is entered as soon as torch has been imported. Imports no
torch itself."""

import atexit
import importlib.abc
import importlib.machinery
import os
import sys
import time


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads torch as it would be loaded without this, then enters the mode."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        sys.meta_path.remove(self)  # not in find_spec, which importlib.util.find_spec calls without loading
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        import numbers_mode

        numbers_mode.start()


# At its end a process waits for the threads of its last backward pass: one that releases a Python object (a
# mode, say) while the interpreter is finalized aborts the process.
atexit.register(time.sleep, 0.2)
if os.environ.get("STANDIN_MODE") == "numbers":
    sys.meta_path.insert(0, _AfterTorch())
