"""Workers on the machines of a Ray cluster that is there already, beside those of this machine."""
