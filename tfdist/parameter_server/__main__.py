"""`python -m tfdist.parameter_server`: the name of `python -m tfdist.servers` in release 0.1.0."""

import sys

from tfdist.servers.__main__ import main

sys.exit(main())
