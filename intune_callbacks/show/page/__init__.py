"""The page of a run, `report.html`, and the comparison of two runs; made from what a run left in its folder."""
