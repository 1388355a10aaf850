"""`dsft launch`: starts a run on all of its hosts, watches it, and ends all of it. Takes a spec; starts
processes here and, through ssh or srun, on other hosts; writes runs/NAME/logs. Imports no torch.

    command   the story of one `dsft launch`          agent   the program on each host
    parts     what each host is to run, as text       part    the launcher's process of a host, and its ranks
    attempt   one start of all parts, to their end    verdict what failed first, and the exit code
"""
