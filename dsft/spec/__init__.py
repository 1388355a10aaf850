"""YAML to a checked `Spec`.

Takes       a file and `key=value` texts
Gives       frozen models (`schema`), all problems at once (`load`), the table of DeepSpeed's traps (`rules`)
May touch   the files that a spec names, for reading; `template` writes a new spec; no torch, no environment
"""
