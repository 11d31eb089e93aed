"""``python -m deepspeed_pulse.cli``."""

import sys

from deepspeed_pulse.cli import main

if __name__ == "__main__":
    sys.exit(main())
