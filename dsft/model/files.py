"""Find a model's safetensors files, and read ranges of their tensors by the names in the module, which
`dsft.model.conversion` maps."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from dsft.errors import MissingInputError
from dsft.model.conversion import ConvertedTensors, TensorMap, read_map
from dsft.model.packed_files import PackedWeights
from dsft.model.read import check_tensors
from dsft.model.weights import Shape
from dsft.model.whole import Whole
from dsft.plan.storage import Form
from dsft.system.digest import content_digests
from dsft.system.files import cache_folder
from dsft.system.json_file import read_json, reason_of, special_kind

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TENSOR_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The types of tensors in safetensors files (https://github.com/huggingface/safetensors#format)."""
TRAINABLE = ("F64", "F32", "F16", "BF16")
"""safetensors' types of weights that can be trained; those of quantized models cannot."""

PIECE = 2**20  # elements that are read at a time
SAMPLES, SAMPLE = 64, 2**12  # number of `samples` per file, and bytes of each


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
            if facts["dtype"] not in TENSOR_TYPES:
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
        dtype = TENSOR_TYPES[self.dtype(key)]
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
        self._packed = PackedWeights(self._file_of, self._bytes, where)
        if whole and self._packed.shapes:
            raise MissingInputError(
                f"{where} is a multimodal model in 4 bits, which dsft cannot read; give the model that was "
                "quantized."
            )
        in_files = whole.model if whole else model
        tensors = in_files.state_dict()
        tensor_map = read_map(in_files, [key for key in self._file_of if key not in self._packed.beside])
        if whole:
            self._check_whole(whole.model, tensor_map)
            whole.converted_back(tensor_map, model, self._shape, self._read)  # raises where an export would
            tensor_map = whole.text_map(tensor_map, model)
        for key in (key for one in tensor_map.conversions for _, key in one.parts):
            if key in self._packed.shapes:
                raise MissingInputError(
                    f"{where}: {key} is in 4 bits, and is joined with others in transformers 5, which would "
                    "quantize it again; give the model that was quantized."
                )
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

    def _check_whole(self, model: PreTrainedModel, tensor_map: TensorMap) -> None:
        """Raise MissingInputError for tensors with which transformers would not load the multimodal model,
        or would take integers for weights. Exports have those around the text model as the files have
        them."""
        sources = {name: [key] for name, key in tensor_map.unchanged.items()}
        shapes = {name: self._shape(key) for name, key in tensor_map.unchanged.items()}
        for conversion in tensor_map.conversions:
            made = conversion.shapes(self._shape, model)
            shapes |= made
            sources |= dict.fromkeys(made, [key for _, key in conversion.parts])
        wrong_types = [
            f"{key} has the type {self._file_of[key].dtype(key)}, not one of weights"
            for name, parameter in model.named_parameters(remove_duplicate=False)
            for key in sources.get(name, ())
            if parameter.is_floating_point() and self._file_of[key].dtype(key) not in TRAINABLE
        ]
        check_tensors(model, shapes, (), self.where, wrong_types)

    def _check_types(self, parameters: Iterable[str]) -> None:
        for key in (key for name in parameters if name in self.shapes for key in self._sources(name)):
            if key not in self._packed.shapes and (dtype := self._file_of[key].dtype(key)) not in TRAINABLE:
                raise MissingInputError(
                    f"{self.where}: {key} has the type {dtype}, and a quantized model cannot be trained; "
                    "give the model that was quantized."
                )

    def packed(self, name: str, form: Form, dtype: torch.dtype) -> Tensor | None:
        """Return the elements in 4 bits that the files have of a weight; None where they do not have it in
        this form."""
        return self._packed.elements(self._keys.get(name, ""), form, dtype)

    def _shape(self, key: str) -> Shape:
        return self._packed.shapes.get(key) or self._file_of[key].shape(key)

    def _read(self, key: str, start: int, out: Tensor) -> None:
        (self._packed if key in self._packed.shapes else self._file_of[key]).read(key, start, out)

    def _bytes(self, key: str) -> Tensor:
        file = self._file_of[key]
        out = torch.empty(math.prod(file.shape(key)), dtype=TENSOR_TYPES[file.dtype(key)])
        file.read(key, 0, out)
        return out.view(torch.uint8)


def tensor_names(name_or_path: str) -> list[str]:
    """Return the names of all tensors in the safetensors files. Raises as `weight_files` and
    `SafetensorsFile` do."""
    return [key for path in weight_files(name_or_path) for key in SafetensorsFile(path).keys]


def weight_files(name_or_path: str) -> list[Path]:
    """Return the safetensors files of a folder, or of a hub id, which is looked up in the cache or
    downloaded; an empty list where there are none. Raises MissingInputError where it is neither, and where
    the index is damaged or names what is not a file of the folder."""
    return _listed(name_or_path, SINGLE, INDEX, ["model*.safetensors", INDEX])


def pickled_files(name_or_path: str) -> list[Path]:
    """Return the files in torch's pickle format, which transformers reads where `weight_files` finds none.
    Raises as it does."""
    return _listed(name_or_path, *PICKLED, ["pytorch_model*.bin"])


def model_files(name_or_path: str) -> list[Path]:
    """Return the files that a model is read from, safetensors or else pickled. Raises as `weight_files`."""
    return weight_files(name_or_path) or pickled_files(name_or_path)


def _listed(name_or_path: str, single: str, index: str, patterns: Sequence[str]) -> list[Path]:
    """Return the file `single` of a folder or hub id, or else the files that `index` names."""
    folder = folder_with(name_or_path, patterns)
    if (folder / single).exists():
        names = [single]
    elif (folder / index).exists():
        names = _in_index(folder / index)
    else:
        return []
    where = f"the model {name_or_path!r}"
    if absent := [name for name in names if not (folder / name).exists()]:
        raise MissingInputError(
            f"{where} has no {', '.join(absent)}, which {index} names; "
            "download or copy the missing files too."
        )
    if unfit := [clause for name in names if (clause := _unfit(folder, name))]:
        raise MissingInputError(f"{where}: {'; '.join(unfit)}. Give a folder that has the files themselves.")
    return [folder / name for name in names]


def _in_index(index: Path) -> list[str]:
    """Return the names of the files in an index."""
    reason = "it does not say which file has which tensor"
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name or "\0" in name]
        (index.parent / max(names, key=len, default="")).exists()  # raises OSError for a name too long
        reason = f"it names {outside[0]!r}, which is not a file of its folder" if outside else ""
    except (OSError, ValueError) as error:
        reason = f"it {reason_of(error)}"
    except (KeyError, TypeError, AttributeError):
        pass
    if reason:
        raise MissingInputError(f"{index} is damaged: {reason}; copy or download it again.")
    return names


def _unfit(folder: Path, name: str) -> str | None:
    """Return a clause where a folder's file is no file, or a link that leaves the folder for another place
    than the hub's cache, which has contents in models--NAME/blobs; None where it can be read."""
    path, place = folder / name, (folder / name).resolve()
    if special := special_kind(path):
        return f"{name} is {special}, not a file"
    in_cache = place.parent.name == "blobs" and place.parent.parent.name.startswith("models--")
    if not (in_cache or place.is_relative_to(folder.resolve())):
        return f"{name} is a link to {place}, outside of the folder"
    return None


def folder_with(name_or_path: str, patterns: Sequence[str]) -> Path:
    """Return the folder itself, or that of a hub id with its files of these patterns."""
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise MissingInputError(
            f"The model {name_or_path!r} has no readable weights ({str(error).splitlines()[0]}); give a "
            "folder with safetensors files, or a hub id that is in the cache or can be downloaded."
        ) from None


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by its name, computed once per host (`content_digests`). Raises
    MissingInputError for a file that cannot be read, DataError for one that changes meanwhile."""
    with readable():
        found = content_digests(paths, digest_folder())
    return {path.name: digest for path, digest in zip(paths, found, strict=True)}


def digest_folder() -> Path:
    """Return the folder in which this host keeps the digests of weight files."""
    return cache_folder() / "digests"


@contextmanager
def readable() -> Iterator[None]:
    """Turn an error in reading a model's file into a MissingInputError."""
    try:
        yield
    except OSError as error:
        raise MissingInputError(
            f"{error.filename} cannot be read ({error.strerror}); give a folder with all files of the model."
        ) from None


def samples(name_or_path: str) -> dict[str, list[int | str]]:
    """Return the size of each weight file, and the SHA-256 of its first kilobytes and of others at equal
    distances, by the file's name: what dsft up to 0.1 wrote into checkpoints in place of digests. Raises as
    `weight_files` does, and MissingInputError for a file that cannot be read."""
    found: dict[str, list[int | str]] = {}
    for path in model_files(name_or_path):
        with readable(), path.open("rb") as file:
            digest, size = hashlib.sha256(), path.stat().st_size
            for number in range(SAMPLES):
                file.seek(number * (size // SAMPLES + 1))
                digest.update(file.read(SAMPLE))
            found[path.name] = [size, digest.hexdigest()]
    return found
