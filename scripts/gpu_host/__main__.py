"""`python -m paged_trt.scripts.gpu_host`."""

import sys

from paged_trt.scripts.gpu_host.command import main

if __name__ == "__main__":
    sys.exit(main())
