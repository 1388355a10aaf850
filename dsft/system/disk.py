"""Check that a folder of this host can take DeepSpeed's swap files; raise StorageError if it cannot.

Checked before anything is built, because DeepSpeed's asynchronous I/O bypasses the page cache (O_DIRECT):
that fails on memory file systems and crawls on network ones, and a full disk would end a run within a step.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import shutil
import socket
import tempfile
from pathlib import Path

from dsft.errors import StorageError

GIB = 2**30  # bytes

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})

ON_THE_NETWORK = frozenset(
    "9p afs beegfs ceph cifs fhgfs fuse.beegfs fuse.ceph fuse.gcsfuse fuse.glusterfs fuse.juicefs fuse.s3fs "
    "fuse.sshfs glusterfs gpfs lustre ncpfs nfs nfs4 orangefs panfs smb3 smbfs wekafs".split()
)

MOUNTS = Path("/proc/self/mountinfo")

CAP_IPC_LOCK = 14  # linux/capability.h


def check_disk(folder: Path, key: str) -> None:
    """Check that the folder exists, is on a disk of this host and can be written past the page cache. key: of
    the spec, for the message."""
    here = f"{key}: {folder} on {socket.gethostname()}"
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:  # a parent folder cannot be entered
        raise StorageError(f"{here} cannot be reached ({error.strerror}); name another folder.") from None
    if not is_folder:
        what = "is not a folder" if exists else "does not exist"
        raise StorageError(f"{here} {what}; create it on every host, or name a folder that all have.")
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise StorageError(
            f"{here} is in memory ({kind}), where swapping saves nothing; name a folder on a local "
            "disk, or set device cpu."
        )
    if kind in ON_THE_NETWORK:
        raise StorageError(
            f"{here} is on the network ({kind}), which every step would wait for; name a folder on "
            "a local disk."
        )
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, mmap.PAGESIZE) as page:
            file.write(b"\0")
            direct = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            try:
                os.write(direct, page)
            finally:
                os.close(direct)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise StorageError(
                f"{here} supports no reads and writes past the page cache (O_DIRECT); name another folder."
            ) from None
        raise StorageError(f"{here} cannot be written ({error.strerror}); name another folder.") from None


def size_text(count: int, digits: int = 1) -> str:
    """Format a number of bytes in the unit (B to TiB) that leaves one to four digits before the point."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.{digits}f} TiB"


def check_swap_space(folder: Path, needed: int, key: str) -> None:
    """Check that the folder's disk has `needed` bytes free, for all ranks of this host together."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{key}: {folder} on {socket.gethostname()} has {size_text(free, 2)} free, but this run swaps "
            f"up to {size_text(needed, 2)}; free space, name another disk, or "
            "spread the model over more hosts."
        )


def check_locked(needed: int) -> None:
    """Check that this process may lock `needed` bytes of memory, as DeepSpeed does for its swap buffers;
    otherwise the process would be aborted (deepspeed_pin_tensor.cpp:48 assert)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or needed <= limit or may_lock_all():
        return
    raise StorageError(
        f"Each process locks swap buffers of {size_text(needed, 2)} in memory, but {socket.gethostname()} "
        f"allows {size_text(limit, 2)} (ulimit -l); raise it: ulimit -l unlimited, memlock in "
        "/etc/security/limits.conf, or --ulimit memlock=-1 for a container."
    )


def file_system(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the file system that contains the folder, such as ext4, xfs, nfs4; None if
    unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    path, best, kind = folder.resolve(), -1, None
    for line in lines:  # proc(5): … mount point (5th) … - type source options
        left, _, right = line.partition(" - ")
        point = Path(_unescaped(left.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= best:  # a later mount hides an earlier one
            best, kind = len(point.parts), right.split()[0]
    return kind


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


def may_lock_all() -> bool:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return os.geteuid() == 0
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> CAP_IPC_LOCK & 1)
