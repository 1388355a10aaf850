"""Start a run on all of its hosts, watch it, and end all its processes (`dsft launch`). Starts processes here
and, through ssh or srun, on other hosts; writes runs/NAME/logs. Imports no torch.

command      one `dsft launch`, from the spec to the exit code
launch_plan  hosts, ranks and what each host runs
attempt      one start on all hosts, to its end
agent        the program on each host
processes    the processes of a job on a host
verdict      hangs, the first failure, exit codes
output       the terminal, logs and status.json
"""
