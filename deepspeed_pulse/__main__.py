"""``python -m deepspeed_pulse``: the command ``ds_pulse``."""

import sys

from deepspeed_pulse.cli import main

if __name__ == "__main__":
    sys.exit(main())
