"""Python imports this module when a process starts whose PYTHONPATH has this directory: see `child_environment`."""

import framework_imports

framework_imports.install()
