"""`python -m tfdist.probe`: the process that measures a program; `tfdist plan` starts it."""

import sys

from tfdist.probe.program_child import main

if __name__ == "__main__":
    main(sys.argv[1:])
