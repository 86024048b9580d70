"""Loads a program of tools/ as a module, so that a test can call its functions."""

import importlib.util
import sys
from types import ModuleType

from tests.support.ranks import ROOT


def load_tool(name: str) -> ModuleType:
    """The module of `tools/NAME.py`, which finds its neighbours as it does when it is run."""
    if str(ROOT / "tools") not in sys.path:
        sys.path.append(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None, f"tools/{name}.py can be loaded"
    assert spec.loader is not None, f"tools/{name}.py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
