"""Which GPU holds which embedding table, on paper: `intune plan`.

costs.py      what a placement needs, and what it sends
placement.py  the placement
remedies.py   what would make it fit
command.py    the command line, text and JSON
"""
