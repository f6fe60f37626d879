"""What `hub_kernels` costs a test, as a ratio to the bare forward of a tiny Llama, on the CPU or the first CUDA device.

A test is all that the fixture does for it: its state kept, kernels put in (or taken out), one forward, its proof, and
everything put back. Beside it what a test does by hand: `kernelize` and transformers' `set_use_kernels`, each within
transformers' own `preserve_module_forwards`, which puts forwards back, and nothing else; neither proves anything. The
kernels are those of examples/hub_kernels, 7 layers and a function, loaded before the clock starts, as they are for all
tests but a process's first. Pairs in turn; the median of the pairs' ratios.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.verdict_witness import pairs, tiny_llama

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "hub_kernels" / "kernels" / "tiny-layers"
LAYERS = {"RMSNorm": f"{TINY}:RMSNorm", "SiLU": f"{TINY}:SiLU", "rotary_pos_emb": f"{TINY}:Rotary"}


def refuse(reasons: Sequence[Any]) -> NoReturn:
    """Nothing is measured where kernels cannot be used."""
    raise SystemExit(" | ".join(map(str, reasons)))


def forms(model: Any, forward: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """What a test does, by name: with the fixture, and by hand."""
    from kernels import Mode, kernelize, use_kernel_mapping
    from transformers.testing_utils import preserve_module_forwards

    from pytest_cudaenv.verdict.hub_engine import HubKernels
    from pytest_cudaenv.verdict.kernel_mapping import mapping_of
    from pytest_cudaenv.verdict.kernel_state import Parked

    parked = Parked()
    repositories = mapping_of(LAYERS, model.device.type, ROOT)

    def fixture(use: Callable[[HubKernels], None], **state: Any) -> Callable[[], None]:
        def test() -> None:
            engine = HubKernels(refuse, root=ROOT, parked=parked, executed=True, mapping=LAYERS, **state)
            engine.begin()
            try:
                use(engine)
                assert not engine.unproven()
                engine.as_data()
            finally:
                engine.end()

        return test

    def on(engine: HubKernels) -> None:
        with engine.on(model) as report:
            forward()
        assert len(report.replaced) == 8 or engine.kernels == "off"

    def by_kernels() -> None:
        with preserve_module_forwards(model), use_kernel_mapping(repositories, inherit_mapping=False):
            kernelize(model, mode=Mode.INFERENCE, device=model.device.type, use_fallback=False)
            forward()

    def by_transformers() -> None:
        # Else transformers' own mapping is asked for layers that the folder has not, on CUDA of the Hub.
        with preserve_module_forwards(model), use_kernel_mapping(repositories, inherit_mapping=False):
            model.set_use_kernels(True)
            forward()

    return {
        "hub_kernels, on": fixture(on),
        "hub_kernels, off": fixture(on, kernels="off"),
        "kernels' kernelize": by_kernels,
        "transformers' set_use_kernels": by_transformers,
    }


def main() -> None:
    """Print each form's ratio, and what it adds to a test."""
    import torch

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "kernels"))
    print(f"Python {platform.python_version()}, {packages}")
    model, forward = tiny_llama(device)
    for name, form in forms(model, forward).items():
        alone, with_it = pairs(forward, form, rounds=200)
        ratio = statistics.median(one / other for one, other in zip(with_it, alone, strict=True))
        adds = statistics.median(one - other for one, other in zip(with_it, alone, strict=True)) * 1e3
        base = statistics.median(alone) * 1e3
        print(f"{name} on {device.type}: {ratio:.2f} of a forward of {base:.1f} ms, {adds:.1f} ms more", flush=True)


if __name__ == "__main__":
    main()
