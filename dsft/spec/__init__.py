"""Read a YAML file and overrides as a checked `Spec`.

schema    frozen models of all sections
load      reading and checking, with all problems reported at once
rules     table of what DeepSpeed refuses or silently gets wrong
template  new specs for `dsft init`

The package reads the files that a spec names; it uses neither torch nor environment variables.
"""
