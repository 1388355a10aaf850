"""Commands of `dsft` that have no package of their own."""
