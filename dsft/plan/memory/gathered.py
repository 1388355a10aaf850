"""Compute what ZeRO 3 gathers, by DeepSpeed's own rules, in the order in which modules use parameters.

Before a module runs, DeepSpeed gathers those of its parameters that are sharded, and begins to gather those
of the next modules, since it has recorded the order in the first pass. After the module it frees what is not
used again soon. Its PartitionedParameterCoordinator decides both, by counting elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from dsft.plan.census import Parameter
from dsft.plan.ds_config import LIVE, PERSIST_BELOW
from dsft.plan.memory.sizes import compute_bytes
from dsft.plan.memory.tensors import MALLOC_KEEPS, NONE, Tensors
from dsft.spec.schema import Spec

LEAF_BLOCKS = "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"
"""Architectures whose mixtures DeepSpeed takes as one module each, of which it gathers all at once
(leaf_module_config.py:11 DEFAULT_LEAF_MODULE_CLASSES)."""


class Use(NamedTuple):
    """A module that runs. own: the numbers of its parameters, which are gathered for it; within: those of its
    children too, which count where what is used soon is searched; leaf: whether all are its own
    (z3_leaf_module)."""

    own: tuple[int, ...] = ()
    within: tuple[int, ...] = ()
    leaf: bool = False


@dataclass(eq=False)
class _Buffer:
    """Parameters that are gathered together. unused: those that no module has used yet."""

    elements: int
    unused: set[int]


class Step(NamedTuple):
    """Elements beside the shares while a module runs: the most while its parameters arrive, and while it is
    computed, both with buffers; those of its last gathering; and those that are left after it."""

    arriving: int
    computing: int
    sent: int
    left: int


Modules = dict[str, list[int]]
"""Name of a module -> numbers of its parameters."""

_bytes = attrgetter("total")


@dataclass(frozen=True)
class Gathered:
    """The most that ZeRO 3 has gathered beside a rank's shares, with the buffers in which it arrives.

    arriving    while parameters are copied from the buffers, or in the first pass, in which the order is not
                known yet and one module is gathered at a time
    in_forward  while they are copied in a forward without a backward
    mlps        while an MLP is computed in the forward
    others      while another part of a layer is
    head        while the output layer is
    backward    while the backward of an MLP is, less the activations that the backward has freed until then
    kept        what a forward without a backward leaves
    """

    arriving: Tensors = NONE
    in_forward: Tensors = NONE
    mlps: Tensors = NONE
    others: Tensors = NONE
    head: Tensors = NONE
    backward: Tensors = NONE
    kept: Tensors = NONE

    @property
    def layers(self) -> Tensors:
        return max(self.mlps, self.others, key=_bytes)

    @property
    def most(self) -> Tensors:
        return max(self.in_forward, self.layers, self.head, key=_bytes)


def gathered(
    parameters: Sequence[Parameter], spec: Spec, bucket: int, leaves: frozenset[str], stored: int | None
) -> Gathered:
    """Return what a rank gathers of these parameters, whose modules run in the order of the census. bucket:
    elements gathered ahead; leaves: names of modules of which all is gathered at once; stored: bytes of the
    activations of all layers, of which the backward frees one after the other; None without a backward."""
    sizes, outside, layers = _placed(parameters, spec, leaves)
    if not sizes:
        return Gathered()
    first, last = ([_use(own) for own in outside[is_first].values()] for is_first in (True, False))
    forward = first + [use for blocks in layers.values() for use in _forward(blocks, leaves)] + [Use()]
    uses, done = forward + last, list[int]()  # for each module, the layers whose backward has ended
    if stored is not None:
        around = Use(within=tuple(sizes))  # the model itself
        uses += [around, *last[::-1], around, Use()]
        done = [0] * len(uses)
        for before, (number, blocks) in enumerate(reversed(layers.items())):
            uses += _forward(blocks, leaves) if spec.model.checkpoints(number) else []
            uses += _backward(blocks, leaves)
            done += [before] * (len(uses) - len(done))
        uses += first[::-1]
    done += [len(layers)] * (len(uses) - len(done))
    found = [*gathered_at_once(uses, sizes, bucket)]
    is_small = max(sizes.values()) * compute_bytes(spec) <= MALLOC_KEEPS

    def held(elements: int) -> Tensors:
        size = elements * compute_bytes(spec)
        return Tensors(size, 0) if is_small else Tensors(0, size)

    # gloo gathers into a copy of its own (ProcessGroupGloo, all_gather_into_tensor)
    copied = [step.sent * spec.is_on_cpu for step in found]

    def most_arriving(steps: Iterable[int]) -> Tensors:
        return held(max((found[n].arriving + copied[n] for n in steps), default=0))

    def most(steps: Iterable[int], freed: int = 0) -> Tensors:
        return held(max((found[n].computing + copied[n] - freed * done[n] for n in steps), default=0))

    freed = (stored or 0) // compute_bytes(spec) // max(1, len(layers))
    head, end = len(forward), len(forward) + len(last)
    backward = end + 1 + len(last)
    modules = (sum(sizes[number] for number in use.own) for use in uses if len(use.own) > 1)
    of_mlps = {n for n, parameter in enumerate(parameters) if parameter.mlp or parameter.experts > 1}
    mlps = [step for step, use in enumerate(uses) if of_mlps.intersection(use.own)]
    forward_mlps = [step for step in mlps if step < head]
    return Gathered(
        arriving=max(held(2 * max(modules, default=0)), most_arriving(range(len(uses))), key=_bytes),
        in_forward=most_arriving(range(end)),
        mlps=most(forward_mlps),
        others=most({*range(head)} - {*forward_mlps}),
        head=most(range(head, end if stored is None else backward)),
        backward=most([step for step in mlps if step > end] or range(backward, len(uses)), freed=freed),
        kept=held(found[end - 1].left),
    )


def _placed(
    parameters: Sequence[Parameter], spec: Spec, leaves: frozenset[str]
) -> tuple[dict[int, int], dict[bool, Modules], dict[int, dict[str, Modules]]]:
    """Return the elements of each parameter that is sharded; the modules outside of the layers, before (True)
    and after them; and those of each layer by block. Vectors are left out: nearly all are too small to be
    sharded."""
    sizes: dict[int, int] = {}
    outside: dict[bool, Modules] = {True: {}, False: {}}
    layers: dict[int, dict[str, Modules]] = {}
    for number, parameter in enumerate(parameters):
        elements = sum(tensor.numel for tensor in parameter.stored(spec.train.precision))
        if elements <= PERSIST_BELOW or len(parameter.shape) == 1:
            continue
        sizes[number], layer, module = elements, parameter.layer, parameter.module
        if layer is None:
            is_first = parameter.embedding or parameter.before
            outside[is_first].setdefault(module, []).append(number)
            if is_first and parameter.aliases:
                outside[False]["tied"] = [number]
            continue
        before, number_of_layer, rest = module.partition(f".{layer}.")
        block = f"{before}{number_of_layer}{rest.partition('.')[0]}"
        own = block if block in leaves else module
        layers.setdefault(layer, {}).setdefault(block, {}).setdefault(own, []).append(number)
    return sizes, outside, layers


def _use(own: Sequence[int], *, leaf: bool = False) -> Use:
    """Return a module without children that have parameters."""
    return Use(tuple(own), tuple(own), leaf)


def _forward(layer: dict[str, Modules], leaves: frozenset[str]) -> list[Use]:
    """Return the modules that run in a layer's forward: itself, and of attention and the MLP a norm, the
    block and its linear layers."""
    found = [_around(*layer.values())]
    for block, modules in layer.items():
        found += [Use()] if block in leaves else [Use(), _around(modules)]
        found += [_use(own, leaf=block in leaves) for own in modules.values()]
    return found


def _backward(layer: dict[str, Modules], leaves: frozenset[str]) -> list[Use]:
    """Return the modules that run in a layer's backward."""
    found = [_around(*layer.values())]
    for block, modules in reversed(layer.items()):
        found += [] if block in leaves else [_around(modules)]
        found += [_use(own, leaf=block in leaves) for own in reversed(modules.values())] + [Use()]
    return found


def _around(*blocks: Modules) -> Use:
    """Return a module whose parameters are those of these children."""
    return Use(within=tuple(number for modules in blocks for own in modules.values() for number in own))


def gathered_at_once(
    uses: Sequence[Use], sizes: Mapping[int, int], bucket: int, limit: int = LIVE
) -> Iterator[Step]:
    """Yield what is gathered while each module runs, in a pass whose order is known from the one before.

    A module's own parameters are gathered whatever the limit is. Those that are used next follow as long as
    the limit leaves room, up to a bucket; the last may be larger than the room, and those that are gathered
    already do not count (partitioned_param_coordinator.py:453 max_params_to_prefetch). A parameter stays if
    its next use is within the limit, or if this search has passed it
    (partitioned_param_coordinator.py:634 __params_to_release). What is gathered together arrives in a buffer,
    which is copied when the first of its parameters is needed, and freed when the last is
    (partition_parameters.py:795 cat). A single parameter is not copied (partition_parameters.py:1373
    _all_gather_sequential).
    sizes: elements of each parameter; bucket: those gathered ahead; limit: of `LIVE`."""
    order = [number for use in uses for number in use.own]
    ends = [*accumulate(len(use.own) for use in uses)]
    stays = _stays(uses, sizes, limit)
    whole: set[int] = set()
    arriving: dict[int, _Buffer] = {}  # by the number of each parameter that is in it
    live = copied = filled = ahead = 0  # elements; filled: of the buffers

    def gather(numbers: Sequence[int]) -> int:
        nonlocal live, copied, filled
        elements = sum(sizes[number] for number in numbers)
        live += elements
        if len(numbers) < 2:
            copied += elements
            whole.update(numbers)
        else:
            arriving.update(dict.fromkeys(numbers, _Buffer(elements, set(numbers))))
            filled += elements
        return elements

    for step, use in enumerate(uses):
        sent = gather([number for number in use.own if number not in whole and number not in arriving])
        most = copied + filled
        for buffer, number in [(arriving.pop(number), number) for number in use.own if number in arriving]:
            if number not in whole:
                copied += buffer.elements
                whole |= buffer.unused
                most = max(most, copied + filled)
            buffer.unused.discard(number)
            if not buffer.unused:
                filled -= buffer.elements
        room = min(limit - live, bucket)
        chosen, ahead = _ahead(order, max(ahead, ends[step]), sizes, room, whole | arriving.keys())
        sent = gather(chosen) or sent
        computing = copied + filled
        passed = {*order[ends[step] : ahead]}
        for number in use.own:
            if number not in passed and number not in stays[step]:
                live -= sizes[number]
                copied -= sizes[number]
                whole.remove(number)
        yield Step(most, computing, sent, copied + filled)


def _ahead(
    order: Sequence[int], begin: int, sizes: Mapping[int, int], room: int, gathered: set[int]
) -> tuple[list[int], int]:
    """Return the next parameters that fill the room, and the place in the order after the last that was
    looked at."""
    chosen: dict[int, None] = {}
    while begin < len(order) and sum(sizes[number] for number in chosen) < room:
        if order[begin] not in gathered:
            chosen[order[begin]] = None
        begin += 1
    return [*chosen], begin


def _stays(uses: Sequence[Use], sizes: Mapping[int, int], limit: int) -> list[set[int]]:
    """Return for each module its parameters that are used again within `limit` elements. Those of leaf
    modules do not count, but after a leaf module all modules count with their children
    (partitioned_param_coordinator.py:662 params_traversed)."""
    of_leaves = _near([use.within for use in uses], uses, sizes, limit)
    of_others = _near([() if use.leaf else use.own for use in uses], uses, sizes, limit)
    return [a if use.leaf else b for use, a, b in zip(uses, of_leaves, of_others, strict=True)]


def _near(
    counted: Sequence[tuple[int, ...]], uses: Sequence[Use], sizes: Mapping[int, int], limit: int
) -> list[set[int]]:
    """Return for each module its parameters that are again in `counted` within `limit` elements."""
    passed = [*accumulate(sum(sizes[number] for number in numbers) for numbers in counted)]
    found: list[set[int]] = []
    later: dict[int, int] = {}
    for step in reversed(range(len(uses))):
        own = (number for number in uses[step].own if number in later)
        found.append({number for number in own if passed[later[number] - 1] - passed[step] < limit})
        later |= dict.fromkeys(counted[step], step)
    return found[::-1]
