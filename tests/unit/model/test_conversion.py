"""Tensors that are converted between files and modules, of which ranges are read."""

from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from dsft.model.conversion import Conversion, ConvertedTensors, PartRange, read_map
from tests.architectures.cases import small_model

GATE, UP = "mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"
MODEL = SimpleNamespace(config=None)
JOINED = "mlp.experts.gate_up_proj"


def joined_experts() -> tuple[Conversion, dict[str, Tensor]]:
    """Three experts of 2 × 4 elements each, gate and up."""
    parts = [(pattern, pattern.replace("*", str(n))) for pattern in (GATE, UP) for n in range(3)]
    converter = WeightConverter([GATE, UP], JOINED, [MergeModulelist(0), Concatenate(1)])
    return Conversion(converter, JOINED, str, parts), {name: torch.randn(2, 4) for _, name in parts}


def converted(conversion: Conversion, tensors: dict[str, Tensor], read: list[str]) -> ConvertedTensors:
    def read_range(name: str, start: int, out: Tensor) -> None:
        read.append(name)
        out.copy_(tensors[name].flatten()[start : start + len(out)])

    return ConvertedTensors([conversion], lambda name: tuple(tensors[name].shape), read_range, MODEL)


def test_range_of_joined_experts_reads_only_its_parts() -> None:
    conversion, tensors = joined_experts()
    whole = conversion.apply(tensors.values(), MODEL)[JOINED]
    read: list[str] = []
    ranges = converted(conversion, tensors, read)
    assert ranges.shapes == {JOINED: (3, 4, 4)} and tuple(whole.shape) == (3, 4, 4)
    for start, stop in ((0, 48), (5, 11), (17, 18), (30, 48)):
        out = torch.empty(stop - start)
        ranges.read(JOINED, start, out)
        assert torch.equal(out, whole.flatten()[start:stop])
    read.clear()
    ranges.read(JOINED, 18, torch.empty(10))
    assert read == ["mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight"]


def test_whole_rows_are_moved_in_runs() -> None:
    conversion, tensors = joined_experts()
    runs = conversion.runs(lambda name: tuple(tensors[name].shape), {JOINED: (3, 4, 4)}, MODEL)
    assert runs[JOINED][:3] == [
        PartRange("mlp.experts.0.gate_proj.weight", 0, 8),
        PartRange("mlp.experts.0.up_proj.weight", 0, 8),
        PartRange("mlp.experts.1.gate_proj.weight", 0, 8),
    ]


def test_names_as_in_memory_are_read_as_they_are() -> None:
    """Also those that an entry of transformers' table would change into names that no module has."""
    for kind in ("axk1", "laguna"):
        model = small_model(kind)
        names = [name for name in model.state_dict() if ".experts." not in name]
        found = read_map(model, names)
        assert found.unexpected == []
        assert [found.unchanged.get(name) for name in names] == names


def test_transposed_tensors_are_converted_whole() -> None:
    for shape in ((3, 5), (4, 4)):
        conversion = Conversion(WeightConverter("a", "b", [Transpose(0, 1)]), "b", str, [("a", "a")])
        tensors = {"a": torch.randn(shape)}
        assert conversion.runs(lambda _, shape=shape: shape, {"b": shape[::-1]}, MODEL) is None  # type: ignore[misc]
        out = torch.empty(4)
        converted(conversion, tensors, []).read("b", 2, out)
        assert torch.equal(out, tensors["a"].T.flatten()[2:6])
