"""The call of a function in new processes: pickled, run by the launcher, its values and errors sent back."""
