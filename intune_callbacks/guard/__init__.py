"""What every allocation has to pass: the guard, a permit for trials, and the net that goes back to the best one."""
