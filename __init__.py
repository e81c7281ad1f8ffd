"""Makes `import podrl` work in the folder that holds this checkout.

There a checkout named podrl has the name of the package, and Python finds it first, even if podrl is installed with
`pip install -e`. This file then puts the package in its own place.
"""

import importlib.util
import pathlib
import sys

if __name__ == "podrl":
    _package = pathlib.Path(__file__).parent / "podrl"
    _spec = importlib.util.spec_from_file_location(
        __name__, _package / "__init__.py", submodule_search_locations=[str(_package)]
    )
    assert _spec is not None and _spec.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
