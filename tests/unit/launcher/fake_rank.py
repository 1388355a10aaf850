"""A rank for the supervisor's tests: sends heartbeats, steps, saves when asked to stop, fails where asked to.

fake_rank.py STEPS [RANK:STEP:HOW …]    HOW: kill, stop, hang, an exit code, error=TEXT, leaks (a
                                        secret), or late (with step 0: it imports until there is a file `go`)
                                        or dead (with step 0: it is killed during its imports, once the file
                                        is there)
"""

import os
import signal
import subprocess
import sys
import time

from dsft.rank.heartbeat import Heartbeat, begin_log

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
steps, faults = int(sys.argv[1]), [word.split(":", 2) for word in sys.argv[2:] if word.count(":") >= 2]
dies = [str(rank), "0", "dead"] in faults
while (dies or [str(rank), "0", "late"] in faults) and not os.path.exists("go"):
    time.sleep(0.05)
if dies:
    os.kill(os.getpid(), signal.SIGKILL)
asked: list[int] = []
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    if signal.getsignal(each) is not signal.SIG_IGN:  # as `dsft.rank.stopping`
        signal.signal(each, lambda number, _: asked.append(number))
begin_log(os.environ.get("DSFT_LOGS"), rank, world)
heartbeat = Heartbeat(rank, int(os.environ["LOCAL_RANK"]), os.environ.get("DSFT_HEARTBEAT"))
heartbeat.start()
print("arguments", ascii(sys.argv[1:]))


def end(code: int, message: str | None = None) -> None:
    heartbeat.end(code, message)
    sys.stdout.flush()
    os._exit(code)


for step in range(1, steps + 1):
    heartbeat.mark("step", step)
    if rank == 0:
        print(f"step {step}")
    for at, when, how in faults:
        if (int(at), int(when)) == (rank, step):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "hang":
                time.sleep(600)
            elif how == "leaks":  # a secret, in two parts, by Python and by others
                secret = os.environ["CANARY_TOKEN"]
                print(f"token {secret[:5]}", end="", flush=True)
                print(secret[5:], flush=True)
                subprocess.run(["sh", "-c", "echo by a child: $CANARY_TOKEN >&2"])
            elif how.startswith("error="):
                heartbeat.end(1, how[6:])  # before it is printed, as in dsft/train.py
                print(f"error: {how[6:]}", file=sys.stderr)
                end(1, how[6:])
            else:
                end(int(how))
    time.sleep(0.1)
    if asked:
        print(f"asked by {signal.Signals(asked[0]).name}")
        print("saved")
        end(75, "stopped as asked")
end(0)
