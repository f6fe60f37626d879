"""What `kernels` and transformers pass over in silence, or with a line of log, ends the test here, with its code."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kernels")
pytest.importorskip("transformers")

from pytest_cudaenv.verdict.kernel_errors import HubKernelError, KernelFaultError
from pytest_cudaenv.verdict.kernel_report import KernelReportError
from tests.hub_kernels.tiny import FULL, KERNELS, ODD, ROOT, TINY, Refused

WRONG_TORCH = "torch29-cxx11-cpu-x86_64-linux"


def norm_mapping(repository: Any, mode: Any = None, device: Any = "cpu") -> dict[str, Any]:
    return {"RMSNorm": {device: repository if mode is None else {mode: repository}}}


def has_no_kernel(model: Any) -> bool:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return all("forward" not in m.__dict__ for m in (*model.modules(), apply_rotary_pos_emb))


# With transformers' own entry points ---------------------------------------------------------------------------


@pytest.fixture
def cached_without_build(seeded: Callable[..., str], patched: Callable[..., Path]) -> None:
    seeded("org/tiny", patched(TINY, variant=WRONG_TORCH))


@pytest.mark.usefixtures("cached_without_build")
def test_transformers_alone_says_nothing_of_a_missing_build(model: Any) -> None:
    """The silence that the next tests break; they would prove nothing if transformers began to raise."""
    from kernels import LayerRepository, use_kernel_mapping

    from pytest_cudaenv.verdict.kernel_state import KernelState

    state = KernelState()
    try:
        with use_kernel_mapping(norm_mapping(LayerRepository("org/tiny", layer_name="RMSNorm", version=1))):
            model.set_use_kernels(True)
        assert model.use_kernels
        assert not state.repositories.get(model.model.norm)
        assert model.model.norm.__dict__["forward"].__func__ is type(model.model.norm).forward
    finally:
        state.restore()


@pytest.mark.usefixtures("cached_without_build")
def test_no_build_variant_is_a_skip_with_the_variants(engine: Any, model: Any) -> None:
    with pytest.raises(Refused, match=WRONG_TORCH) as caught:
        engine.on(model, {"RMSNorm": "org/tiny:RMSNorm@v1"})
    assert caught.value.codes == ["kernels-variant"]
    assert "Torch version (2.9) does not match" in caught.value.reasons[0].remedy
    assert has_no_kernel(model)


@pytest.mark.usefixtures("cached_without_build")
def test_no_build_variant_under_watch_is_a_skip(engine: Any, model: Any) -> None:
    from kernels import LayerRepository, use_kernel_mapping

    mapping = norm_mapping(LayerRepository("org/tiny", layer_name="RMSNorm", version=1))
    with engine.watch(allow_fallback={"SiLU", "rotary_pos_emb"}), use_kernel_mapping(mapping):
        with pytest.raises(Refused) as caught:
            model.set_use_kernels(True)
        raise_nothing_more(engine)
    assert caught.value.codes == ["kernels-variant"]


def raise_nothing_more(engine: Any) -> None:
    for report in engine.reports:
        report.check = None


def test_a_device_that_the_default_mapping_lacks_is_an_error_under_watch(engine: Any, model: Any) -> None:
    with engine.watch(), pytest.raises(HubKernelError, match=r"\[kernels-no-device\]"):
        model.set_use_kernels(True)
    assert has_no_kernel(model)


def test_a_fallback_that_is_allowed_is_told(engine: Any, model: Any) -> None:
    with engine.watch(allow_fallback={"RMSNorm", "SiLU", "rotary_pos_emb"}) as report:
        model.set_use_kernels(True)
    assert {row.status for row in report.rows} == {"untouched"}
    assert all("kernels-no-device" in str(row.reason) for row in report.rows)
    with pytest.raises(KernelReportError, match="kernels-fallback"):
        report.assert_no_fallback()


def test_watching_what_never_happened_is_an_error(engine: Any, model: Any) -> None:
    with pytest.raises(HubKernelError, match="kernels-unused"), engine.watch():
        model.set_use_kernels(False)


# Kernelize's own ------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_mapped(engine: Any, model: Any) -> None:
    with pytest.raises(HubKernelError, match=r"\[kernels-no-device\]"):
        engine.on(model, {"RMSNorm": {"xpu": f"{TINY}:RMSNorm"}})


def test_a_mode_that_is_not_mapped(engine: Any, model: Any) -> None:
    with pytest.raises(HubKernelError, match=r"\[kernels-mode\]"):
        engine.on(model.train(), {"RMSNorm": {"inference": f"{TINY}:RMSNorm"}})


@pytest.mark.parametrize(
    ("layer", "mode"), [("InferenceOnly", "training"), ("InferenceOnly", "inference|torch_compile")]
)
def test_a_kernel_that_says_it_cannot(engine: Any, model: Any, layer: str, mode: str) -> None:
    with pytest.raises(KernelFaultError, match=r"\[kernels-claim\]"):
        engine.on(model, {"RMSNorm": f"{ODD}:{layer}"}, mode=mode)
    assert has_no_kernel(model)


def test_a_capability_out_of_range(engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from kernels import CUDAProperties, Device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    hopper = Device(type="cuda", properties=CUDAProperties(min_capability=90, max_capability=99))
    with pytest.raises(Refused) as caught:
        engine.on(model, {"RMSNorm": {hopper: f"{TINY}:RMSNorm"}}, device="cuda")
    assert caught.value.codes == ["kernels-capability"]


def test_the_capability_is_asked_anew_for_each_test(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from kernels import CUDAProperties, Device

    from pytest_cudaenv.verdict.hub_engine import HubKernels
    from tests.hub_kernels.tiny import refuse

    hopper = Device(type="cuda", properties=CUDAProperties(min_capability=90, max_capability=99))
    for capability, replaced in (((8, 6), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        engine = HubKernels(refuse, root=ROOT)
        try:
            if replaced:
                assert engine.on(model, {"RMSNorm": {hopper: f"{TINY}:RMSNorm"}}, device="cuda").replaced
            else:
                with pytest.raises(Refused):
                    engine.on(model, {"RMSNorm": {hopper: f"{TINY}:RMSNorm"}}, device="cuda")
        finally:
            engine.end()


def test_a_cuda_mapping_on_a_torch_without_cuda_is_a_skip(engine: Any, model: Any) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with pytest.raises(Refused) as caught:
        engine.on(model, {"RMSNorm": {"cuda": f"{TINY}:RMSNorm"}}, device="cuda")
    assert caught.value.codes == ["kernels-device"]


def test_a_layer_name_that_no_mapping_has(engine: Any, model: Any) -> None:
    with engine.on(model, {"RMSNorm": f"{TINY}:RMSNorm"}) as report:
        pass
    left = {row.layer_name: row.reason for row in report.fell_back}
    assert left.keys() == {"SiLU", "rotary_pos_emb"}
    assert all(reason.startswith("[kernels-unmapped]") for reason in left.values())
    with pytest.raises(KernelReportError, match="kernels-not-replaced"):
        report.assert_replaced("SiLU")


def test_a_layer_name_that_the_model_lacks(engine: Any, model: Any) -> None:
    with pytest.raises(HubKernelError, match=r"\[kernels-layer\] no RmsNorm .* have RMSNorm, SiLU, rotary_pos_emb"):
        engine.on(model, {"RmsNorm": f"{TINY}:RMSNorm"})


def test_a_model_without_anything_to_replace(engine: Any) -> None:
    import torch

    with pytest.raises(HubKernelError, match=r"\[kernels-none\]"):
        engine.on(torch.nn.Linear(2, 2), FULL)


def test_a_condition_that_says_no(engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.model.norm), "kernel_condition", staticmethod(lambda _: False))
    with pytest.raises(HubKernelError, match=r"\[kernels-condition\]"):
        engine.on(model, {"RMSNorm": f"{TINY}:RMSNorm"})
    with engine.on(model, {"RMSNorm": f"{TINY}:RMSNorm"}, allow_fallback="RMSNorm") as report:
        pass
    assert not report.replaced


# Turned off before anything is imported ------------------------------------------------------------------------

PROGRAM = """
    import sys
    sys.path.insert(0, {root!r})
    from tests.hub_kernels.tiny import FULL, ROOT, Refused, refuse, tiny_llama
    from pytest_cudaenv.host.software import installed_software
    from pytest_cudaenv.verdict.hub_engine import HubKernels
    from pytest_cudaenv.verdict.kernel_errors import HubKernelError
    model = tiny_llama()
    unaware = lambda: installed_software().__class__(**{{**vars(installed_software()), "environ": {{}}}})
    for software in (installed_software, unaware):
        try:
            HubKernels(refuse, root=ROOT, software=software).on(model, FULL)
            print("passed")
        except Refused as refused:
            print(*refused.codes)
        except HubKernelError as error:
            print(error.code)
"""


@pytest.mark.parametrize("variable", ["DISABLE_KERNEL_MAPPING=1", "USE_HUB_KERNELS=0"])
def test_a_variable_that_turns_kernels_off(variable: str) -> None:
    """Also where the variable was taken away after the import that read it."""
    name, _, value = variable.partition("=")
    program = textwrap.dedent(PROGRAM).format(root=str(ROOT))
    environ = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=False)
    assert run.stdout.split() == ["kernels-off", "kernels-off"], run.stderr[-2000:]


def test_a_pair_that_transformers_ignores(model: Any) -> None:
    from dataclasses import replace

    from pytest_cudaenv.host.software import installed_software
    from pytest_cudaenv.verdict.hub_engine import HubKernels
    from tests.hub_kernels.tiny import refuse

    here = installed_software()
    old = replace(here, distributions={**here.distributions, "kernels": "0.12.0"})
    with pytest.raises(Refused) as caught:
        HubKernels(refuse, root=ROOT, software=lambda: old).on(model, FULL)
    assert caught.value.codes == ["kernels-version"]


# Attention ------------------------------------------------------------------------------------------------------


def test_a_function_that_transformers_ignores(engine: Any, model: Any) -> None:
    engine.override("org/attn", KERNELS / "demo-attn")
    with pytest.raises(HubKernelError, match=r"\[kernels-attention-name\].*ignores no_such_fn"):
        engine.attention(model, "org/attn:no_such_fn")
    assert model.config._attn_implementation == "eager"


def test_a_folder_for_an_attention_kernel(engine: Any, model: Any) -> None:
    with pytest.raises(HubKernelError, match=r"\[kernels-attention-name\].*override"):
        engine.attention(model, str(KERNELS / "demo-attn"))


def test_a_failed_load_is_not_remembered_as_one_that_worked(engine: Any, model: Any) -> None:
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            engine.attention(model, "org/attn")
        assert caught.value.codes == ["kernels-offline"]
    engine.override("org/attn", KERNELS / "demo-attn")
    with engine.attention(model, "org/attn") as report:
        model(model.dummy_inputs["input_ids"])
    report.assert_replaced("attention")


@pytest.mark.parametrize("function", ["", ":demo_attention"])
def test_a_kernel_that_is_no_flash_attention(engine: Any, model: Any, function: str) -> None:
    engine.override("org/fn", KERNELS / "demo-attn-fn")
    with pytest.raises(KernelFaultError, match=r"\[kernels-attention\]"):
        engine.attention(model, f"org/fn{function}")
