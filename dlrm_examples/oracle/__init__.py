"""Each model's side of `check_oracle`, and the file of numbers it is checked against."""
