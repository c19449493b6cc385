"""`python -m tfdist.launch`: the command `tfdist`, also where no console script is installed."""

import sys

from tfdist.launch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
