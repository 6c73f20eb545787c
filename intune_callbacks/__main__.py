"""``python -m intune_callbacks`` is the `intune` command."""

import sys

from intune_callbacks.cli import main

sys.exit(main())
