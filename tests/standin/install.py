"""Installs the stand-in GPU for one version of torch: its CUDA build, and libraries in place of NVIDIA's.

    python tests/standin/install.py VERSION FOLDER

FOLDER gets `site` (torch, unpacked, without NVIDIA's packages) and `lib` (the libraries). Which libraries
there must be, under which names and with which functions, is read from torch's own: what is not written in
`runtime/` becomes a function that does nothing and reports success (of CUDA's runtime and driver, NVRTC and
CUPTI: one that refuses). Needs gcc, readelf and nm, and a network for pip."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

KERNELS = ("triton==3.7.1", "liger-kernel==0.8.5")
"""Liger of constraints.txt and the Triton of its torch, beside the stand-in: for tests of Liger's kernels in
Triton's interpreter, on the CPU."""

RUNTIME = Path(__file__).resolve().parent / "runtime"

LIBRARIES = {
    "cudart": ("cuda", "__cuda"), "cuda": ("cu",), "cublas": ("cublas",), "cublasLt": ("cublasLt",),
    "cudnn": ("cudnn",), "nccl": ("nccl",), "cusparse": ("cusparse",), "cusparseLt": ("cusparseLt",),
    "cusolver": ("cusolver",), "cufft": ("cufft",), "curand": ("curand",), "cufile": ("cuFile",),
    "nvrtc": ("nvrtc",), "cupti": ("cupti",), "nvshmem_host": ("nvshmem",), "nvToolsExt": ("nvtx",),
    "nvidia-ml": ("nvml",),
}  # fmt: skip
"""The part between `lib` and `.so` of a library's name, and how its functions' names begin."""
REFUSED = {"cudart": 801, "cuda": 801, "nvrtc": 1, "cupti": 15}
"""The code with which functions refuse that are not written here: `cudaErrorNotSupported` and its like."""
PRODUCTS = re.compile(r"[gG]emm|[gG]emv|dot|Matmul$|BackendExecute|Convolution(Forward|Backward)|SpMM$")
"""Functions that launch kernels of their library's own; they are counted."""


def base(name: str) -> str:
    """`cublas` of `libcublas.so.13`."""
    return name.removeprefix("lib").split(".so")[0]


def needed(torch: Path) -> Iterator[tuple[str, str]]:
    """Yield the NVIDIA libraries that torch's libraries name, and whose they are: (library, file name)."""
    for library in sorted((torch / "lib").glob("*.so")):
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-dW", str(library))):
            if base(name) in LIBRARIES:
                yield base(name), name


def undefined(torch: Path) -> Iterator[tuple[str, str]]:
    """Every symbol that torch's libraries take from elsewhere, with its version or ''."""
    for library in sorted((torch / "lib").glob("*.so")):
        for line in run("readelf", "--dyn-syms", "-W", str(library)).splitlines():
            field = line.split()
            if len(field) >= 8 and field[6] == "UND":
                name, _, version = field[7].partition("@")
                yield name, version.lstrip("@")


def owner(name: str) -> str | None:
    """Return the library of a function: the one with the longest beginning that fits."""
    if name.startswith(("cuda_", "cudnn_")):
        return None
    pairs = [(begin, library) for library, begins in LIBRARIES.items() for begin in begins]
    fitting = [(len(begin), library) for begin, library in pairs if name.startswith(begin)]
    return max(fitting)[1] if fitting else None


def defined(compiled: Path) -> set[str]:
    """Return the names that a compiled file gives to others."""
    return {line.split()[-1] for line in run("nm", "-g", "--defined-only", str(compiled)).splitlines()}


def versions(torch: Path) -> dict[str, int]:
    """CUDA, cuDNN and NCCL that this torch was built for, each as its own library says it: 13000, 92000,
    22907."""
    cuda = re.search(r"^cuda.*= '(\d+)\.(\d+)'", (torch / "version.py").read_text(), re.M)
    if cuda is None:
        raise SystemExit(f"{torch} is no CUDA build of torch: take the wheel without +cpu in its version.")
    wheel = "".join(path.read_text() for path in torch.parent.glob("torch-*.dist-info/METADATA"))
    found = {"CUDA": int(cuda[1]) * 1000 + int(cuda[2]) * 10}
    for name, macro in (("cudnn", "CUDNN"), ("nccl", "NCCL")):
        pinned = re.search(rf"nvidia-{name}-cu\d+==(\d+)\.(\d+)\.(\d+)", wheel)
        found[macro] = int(pinned[1]) * 10000 + int(pinned[2]) * 100 + int(pinned[3]) if pinned else 92000
    return found


def stub(library: str, name: str) -> str:
    """Return a function in C that answers in place of one that is not written in `runtime/`."""
    count = "counted(PRODUCTS); " if PRODUCTS.search(name) else ""
    return f"int {name}(void) {{ {count}return {REFUSED.get(library, 0)}; }}\n"


def build(torch: Path, headers: Path, folder: Path) -> None:
    """The libraries that this torch names, compiled into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = dict(needed(torch)) | {"cuda": "libcuda.so.1", "nvidia-ml": "libnvidia-ml.so.1"}
    wanted: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, version in undefined(torch):
        library = base(version) if base(version) in names else owner(name)
        if version == "NVSHMEM":
            library = "nvshmem_host"
        if library in names:
            wanted[library][version].add(name)
    macros = [f"-D{name}={value}" for name, value in versions(torch).items()]
    compiler = ["gcc", "-std=gnu11", "-O1", "-w", "-fPIC", *macros]
    compiler += [f"-I{path}" for path in (RUNTIME, headers, RUNTIME / "include")]
    # The runtime first: the others are linked with it, for its counters.
    for library in sorted(names, key=lambda name: name != "cudart"):
        place = folder / library
        parts: list[str] = []
        have: set[str] = set()
        if (RUNTIME / f"{library}.c").exists():
            run(*compiler, "-c", "-o", f"{place}.o", str(RUNTIME / f"{library}.c"))
            parts, have = [f"{place}.o"], defined(Path(f"{place}.o"))
        rest = sorted(set().union(*wanted[library].values()) - have)
        stubs = "".join(stub(library, name) for name in rest)
        Path(f"{place}.c").write_text('#include "standin.h"\n' + stubs)
        Path(f"{place}.map").write_text(
            "".join(
                f"{version} {{ global: {' '.join(f'{name};' for name in sorted(functions))} }};\n"
                for version, functions in sorted(wanted[library].items())
                if version
            )
        )
        script = [f"-Wl,--version-script={place}.map"] if any(wanted[library]) else []
        counters = [] if library == "cudart" else [f"-L{folder}", f"-l:{names['cudart']}"]
        parts += [f"{place}.c", *script, *counters, "-ldl", "-lpthread"]
        run(*compiler, "-shared", f"-Wl,-soname,{names[library]}", "-o", str(folder / names[library]), *parts)


def run(*command: str) -> str:
    """What the command writes."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"this failed: {' '.join(command)}\n{done.stderr}")
    return done.stdout


def fetched(requirement: str, folder: Path) -> Path:
    """Return the wheel of a package, without what it depends on."""
    pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:")
    run(*pip, "-d", str(folder), requirement)
    [wheel] = folder.glob("*.whl")
    return wheel


def unpack(requirement: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        with zipfile.ZipFile(fetched(requirement, Path(place))) as wheel:
            wheel.extractall(folder)


def headers(torch: Path, folder: Path) -> Path:
    """Return the folder with CUDA's headers for this torch, from the package of CUDA's runtime (2 MB)."""
    cuda = versions(torch)["CUDA"]
    major, minor = cuda // 1000, cuda % 1000 // 10
    unpack(f"nvidia-cuda-runtime{'-cu12' if major == 12 else ''}~={major}.{minor}.0", folder)
    return next(folder.rglob("driver_types.h")).parent


def install(version: str, folder: Path) -> None:
    """Does what is not done yet; `folder/lib` is there only when everything is."""
    folder.mkdir(parents=True, exist_ok=True)
    site, lib = folder / "site", folder / "lib"
    if not (site / "done").exists():
        shutil.rmtree(site, ignore_errors=True)
        # Three signs of equality: of the builds of one version the one without a word behind it, which is
        # CUDA's.
        unpack(f"torch==={version}", site)
        versions(site / "torch")
        (site / "done").touch()
    for requirement in KERNELS:
        if not (place := folder.parent / "triton" / requirement).exists():
            unpack(requirement, place.parent)
            place.touch()
    shutil.rmtree(lib, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        build(site / "torch", headers(site / "torch", Path(place) / "headers"), Path(place) / "lib")
        shutil.move(Path(place) / "lib", lib)


if __name__ == "__main__":
    install(sys.argv[1], Path(sys.argv[2]).resolve())
