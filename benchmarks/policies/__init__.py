"""What the shipped agent is compared with on simulated machines, and what those comparisons run on."""
