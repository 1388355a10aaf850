"""Find a model's safetensors files, and read ranges of their tensors by the names in the module, which
`dsft.model.conversion` maps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from dsft.errors import MissingInputError
from dsft.model.conversion import ConvertedTensors, read_map
from dsft.model.tensor_types import DTYPES
from dsft.model.weights import Shape
from dsft.model.whole import Whole
from dsft.system.json_file import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model*.bin",)
TRAINABLE = ("F64", "F32", "F16", "BF16")
"""safetensors' types of weights that can be trained; those of quantized models cannot."""

PIECE = 2**20  # elements that are read at a time
SAMPLES, SAMPLE = 64, 2**12  # number of samples that hosts compare per file, and bytes of each


class SafetensorsFile:
    """One safetensors file, which is read and not memory-mapped: safetensors' maps for torch are writable, so
    all of a map counts as this process's memory where that is limited (RLIMIT_DATA, strict overcommit)."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises MissingInputError for a file that cannot be read."""
        self.path = path
        try:
            with safe_open(path, framework="pt", backend="pread"):  # which checks the header and the size
                pass
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                self._tensors = json.loads(file.read(header_bytes))
        except (SafetensorError, OSError) as error:
            raise MissingInputError(f"{path} cannot be read ({error}); give the complete folder.") from None
        self._tensors.pop("__metadata__", None)
        for key, facts in self._tensors.items():
            if facts["dtype"] not in DTYPES:
                raise MissingInputError(
                    f"{path}: {key} has the type {facts['dtype']}, which dsft does not know; save the model "
                    "in another type."
                )
        self._begin = 8 + header_bytes
        self.keys = tuple(self._tensors)

    def shape(self, key: str) -> Shape:
        return tuple(self._tensors[key]["shape"])

    def dtype(self, key: str) -> str:
        found: str = self._tensors[key]["dtype"]
        return found

    def read(self, key: str, start: int, out: Tensor) -> None:
        """Fill `out`, (n,) of any type on the CPU, from the flattened tensor, beginning with element
        `start`."""
        dtype = DTYPES[self.dtype(key)]
        first = self._begin + self._tensors[key]["data_offsets"][0] + start * dtype.itemsize
        with self.path.open("rb", buffering=0) as file:
            file.seek(first)
            for piece in out.split(PIECE):
                if piece.dtype == dtype:
                    self._fill(file, piece)
                else:
                    own = torch.empty(len(piece), dtype=dtype)
                    self._fill(file, own)
                    piece.copy_(own)

    def _fill(self, file: FileIO, out: Tensor) -> None:
        left = out.view(torch.uint8).numpy().data
        while left:
            count = file.readinto(left)
            if not count:
                raise MissingInputError(f"{self.path} ends too early; give the complete folder.")
            left = left[count:]


class SafetensorsReader:
    """The values of a model in safetensors files; implements `TensorReader`."""

    def __init__(
        self, model: PreTrainedModel, files: Sequence[Path], where: str, whole: Whole | None = None
    ) -> None:
        """Plan the reads. `model` is on the meta device, as transformers builds it; `whole`: the multimodal
        model that the files are of, if `model` is only its text model. Raises MissingInputError for a file
        that cannot be read, UnsupportedConversionError for a conversion that cannot be planned without the
        values, SpecError for one of a multimodal model that cannot be reversed."""
        self.where = where
        self._file_of = {key: file for file in map(SafetensorsFile, files) for key in file.keys}
        in_files = whole.model if whole else model
        tensors = in_files.state_dict()
        tensor_map = read_map(in_files, self._file_of)
        if whole:
            whole.converted_back(tensor_map, model, self._shape, self._read)  # raises where an export would
            tensor_map = whole.text_map(tensor_map, model)
        self._keys, self.unexpected = tensor_map.unchanged, tensor_map.unexpected
        self.shapes = {name: self._shape(key) for name, key in self._keys.items()}
        bare = SimpleNamespace(
            config=in_files.config,
            get_parameter=tensors.__getitem__,
            get_parameter_or_buffer=tensors.__getitem__,
        )  # the model itself will be cut
        self._converted = ConvertedTensors(tensor_map.conversions, self._shape, self._read, bare)
        self.shapes |= self._converted.shapes
        self._check_types(name for name, _ in model.named_parameters(remove_duplicate=False))

    def read(self, name: str, start: int, out: Tensor) -> None:
        """See `TensorReader.read`."""
        if name in self._keys:
            self._read(self._keys[name], start, out)
        else:
            self._converted.read(name, start, out)

    def origin(self, name: str) -> str:
        """See `TensorReader.origin`; for a tensor that is made from several, the first of these and their
        number."""
        key, *others = self._sources(name)
        found = f"{self._file_of[key].path.name}: {key}"
        return f"{name}, made from {found} and {len(others)} more," if others else found

    def _sources(self, name: str) -> list[str]:
        """Return the names in the files of what the tensor is made from."""
        if name in self._keys:
            return [self._keys[name]]
        return [key for _, key in self._converted.conversions[name].parts]

    def _check_types(self, parameters: Iterable[str]) -> None:
        for key in (key for name in parameters if name in self.shapes for key in self._sources(name)):
            if (dtype := self._file_of[key].dtype(key)) not in TRAINABLE:
                raise MissingInputError(
                    f"{self.where}: {key} has the type {dtype}, and a quantized model cannot be trained; "
                    "give the model that was quantized."
                )

    def _shape(self, key: str) -> Shape:
        return self._file_of[key].shape(key)

    def _read(self, key: str, start: int, out: Tensor) -> None:
        self._file_of[key].read(key, start, out)


def tensor_names(name_or_path: str) -> list[str]:
    """Return the names of all tensors in the safetensors files. Raises as `weight_files` and
    `SafetensorsFile` do."""
    return [key for path in weight_files(name_or_path) for key in SafetensorsFile(path).keys]


def weight_files(name_or_path: str) -> list[Path]:
    """Return the safetensors files of a folder, or of a hub id, which is looked up in the cache or
    downloaded; an empty list where there are none. Raises MissingInputError where it is neither, or the index
    names a missing file."""
    folder = folder_with(name_or_path, ["model*.safetensors", INDEX])
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        return []
    try:
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        absent = [name for name in names if not (folder / name).exists()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise MissingInputError(
            f"{folder / INDEX} is damaged: it does not say which file has which tensor; copy or download it "
            "again."
        ) from None
    if absent:
        raise MissingInputError(
            f"model.name_or_path {name_or_path!r} has no {', '.join(absent)}, which {INDEX} names; "
            "download or copy the missing files too."
        )
    return [folder / name for name in names]


def pickled_files(name_or_path: str) -> list[Path]:
    """Return the files in torch's pickle format, which transformers reads where `weight_files` finds none.
    Raises as it does."""
    folder = folder_with(name_or_path, PICKLED)
    return sorted(path for pattern in PICKLED for path in folder.glob(pattern))


def folder_with(name_or_path: str, patterns: Sequence[str]) -> Path:
    """Return the folder itself, or that of a hub id with its files of these patterns."""
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise MissingInputError(
            f"model.name_or_path {name_or_path!r} has no readable weights: {str(error).splitlines()[0]} "
            "Give a folder with safetensors files, or a hub id that is in the cache or can be downloaded."
        ) from None


FileSample = tuple[str, int, str]
"""A file's name, its size in bytes, and a digest of samples of it."""


def fingerprint(name_or_path: str) -> list[FileSample]:
    """Return samples of the weight files, safetensors or else pickled: equal where ranks of several hosts, or
    several starts of a run, read the same files. Raises as `weight_files` does."""
    return [sample_of(path) for path in weight_files(name_or_path) or pickled_files(name_or_path)]


def sample_of(path: Path) -> FileSample:
    """Return name, size and SHA-256 of the first kilobytes, which list the tensors, and of others at equal
    distances. Raises MissingInputError for a file that cannot be read."""
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(number * (size // SAMPLES + 1))
                digest.update(file.read(SAMPLE))
    except OSError as error:
        raise MissingInputError(
            f"{path} cannot be read ({error.strerror}); give the complete folder."
        ) from None
    return path.name, size, digest.hexdigest()
