"""Grants and the fixtures that name them, on simulated and fabricated hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_cudaenv.host.catalog import simulated_device, simulated_host
from pytest_cudaenv.host.devices import Host, renumbered
from pytest_cudaenv.host.software import Software, TorchBuild

CUDA_TORCH = Software(torch=TorchBuild("2.13.0+cu130", cuda="13.0"))


def mixed_host() -> Host:
    """A T4 in front of two H100s."""
    devices = (simulated_device("t4", 0), simulated_device("h100", 1), simulated_device("h100", 2))
    return Host(devices=renumbered(devices), software=CUDA_TORCH, driver="580.95.05", driver_cuda=(13, 0))


def test_a_test_sees_as_many_devices_as_it_asked_for(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_cudaenv import requires_cuda

        def test_one(cuda_devices, cuda_device):
            assert cuda_devices == (cuda_device,)
            assert cuda_device == "cuda:0" and cuda_device.index == 0 and cuda_device.type == "cuda"
            assert (cuda_device.name, cuda_device.capability) == ("NVIDIA H100 80GB HBM3", (9, 0))

        @requires_cuda(devices=2)
        def test_two(cuda_devices):
            assert [str(d) for d in cuda_devices] == ["cuda:0", "cuda:1"]
            assert cuda_devices[0].uuid != cuda_devices[1].uuid

        @requires_cuda(devices=3)
        def test_three(cuda_devices):
            pytest.fail("there are two")
        """
    )
    result = pytester.runpytest_inprocess("--cuda-simulate", "h100:2", "-rs")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * [[]cuda-devices[]] needs 3 CUDA devices; have 2"])


@pytest.mark.parametrize("level", ["session", "off"])
def test_the_first_devices_that_fit_are_granted(
    pytester: pytest.Pytester, on_host: Callable[[Host], None], level: str
) -> None:
    """A T4 comes first on the bus, and a test that needs Hopper gets an H100 all the same."""
    first = 0 if level == "session" else 1  # a device process sees its own devices only
    on_host(mixed_host())
    pytester.makepyfile(
        f"""
        from pytest_cudaenv import requires_bf16, requires_cuda

        def test_any(cuda_device): assert cuda_device.name == "Tesla T4"

        @requires_cuda(capability=">=9.0")
        def test_hopper(cuda_device): assert (cuda_device, cuda_device.capability) == ("cuda:{first}", (9, 0))

        @requires_bf16
        def test_bf16(cuda_device): assert cuda_device.capability == (9, 0)

        @requires_cuda(devices=2, memory="60GB")
        def test_two_large(cuda_devices): assert [d.index for d in cuda_devices] == [{first}, {first + 1}]

        @requires_cuda(devices=3, capability=">=9.0")
        def test_too_many(cuda_devices): raise AssertionError
        """
    )
    result = pytester.runpytest_inprocess("-rs", "--cuda-isolation", level)
    result.assert_outcomes(passed=4, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * [[]cuda-capability[]] needs capability >=9.0; have 7.5 (T4)"])


def test_a_mask_is_honoured(
    pytester: pytest.Pytester, on_host: Callable[[Host], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`2,0` under a mixed host: cuda:0 is the second H100, and the first one is nobody's."""
    host = mixed_host()
    on_host(host)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    pytester.makepyfile(
        f"""
        from pytest_cudaenv import requires_cuda

        @requires_cuda(devices=2)
        def test_both(cuda_devices):
            assert [d.uuid for d in cuda_devices] == {[host.devices[2].uuid, host.devices[0].uuid]!r}
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_what_was_built_on_other_devices_is_torn_down(pytester: pytest.Pytester) -> None:
    """In the pytest process too, device fixtures live as long as the grant fits, across modules and CPU tests."""
    pytester.makeconftest(
        """
        import pytest
        LOG = []

        @pytest.fixture(scope="session")
        def model(cuda_devices):
            LOG.append(f"load {len(cuda_devices)}")
            yield len(cuda_devices)
            LOG.append(f"free {len(cuda_devices)}")

        @pytest.fixture(scope="session")
        def tokenizer():
            LOG.append("tokenizer")

        def pytest_sessionfinish():
            print("\\nLOG", "; ".join(LOG))
        """
    )
    one = """
        from pytest_cudaenv import requires_cuda
        def test_first(model, tokenizer): assert model == 1
        def test_cpu(tokenizer): pass
        def test_second(model): assert model == 1
    """
    two = """
        from pytest_cudaenv import requires_cuda
        @requires_cuda(devices=2)
        def test_pair(model, tokenizer): assert model == 2
        def test_single(model): assert model == 1
    """
    pytester.makepyfile(test_a=one, test_b=one, test_c=two)
    result = pytester.runpytest_inprocess("--cuda-simulate", "h100:2", "-s", "--cuda-isolation", "off")
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["LOG load 1; tokenizer; free 1; load 2; free 2; load 1; free 1"])


NO_DEVICE = """
    import pytest_cudaenv.host.detect
    from pytest_cudaenv.host.devices import Host
    from pytest_cudaenv.host.software import Software, TorchBuild
    pytest_cudaenv.host.detect.detect_host = lambda *_: Host(software=Software(torch=TorchBuild("2.13.0+cpu")))
"""
"""A conftest that makes a run of its own process find no NVIDIA device."""


def test_device_is_the_cpu_only_where_there_is_no_nvidia_device(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(NO_DEVICE)
    pytester.makepyfile(
        """
        import pytest_cudaenv
        def test_device(device, mixed_precision):
            assert device.type == "cpu"
            assert mixed_precision == {"bf16": False, "fp16": False}
            assert pytest_cudaenv.current().devices == ()
            assert pytest_cudaenv.current().device == device
        def test_needs_one(cuda_device): raise AssertionError
        """
    )
    result = pytester.runpytest_subprocess("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * [[]cuda-none[]] needs a CUDA device; have none"])


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("t4", {"bf16": False, "fp16": True}),
        ("v100", {"bf16": False, "fp16": True}),
        ("a10g", {"bf16": True, "fp16": False}),
        ("gb10", {"bf16": True, "fp16": False}),
    ],
)
def test_mixed_precision_follows_the_device(pytester: pytest.Pytester, name: str, keywords: dict[str, bool]) -> None:
    pytester.makepyfile(f"def test_keywords(mixed_precision): assert mixed_precision == {keywords!r}")
    pytester.runpytest_inprocess("--cuda-simulate", name).assert_outcomes(passed=1)


def test_current_in_a_unittest_class(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import unittest
        import pytest_cudaenv
        from pytest_cudaenv import requires_cuda

        class OldTest(unittest.TestCase):
            @requires_cuda(devices=2)
            def test_with(self):
                running = pytest_cudaenv.current()
                self.assertEqual([str(d) for d in running.devices], ["cuda:0", "cuda:1"])
                self.assertEqual(str(running.device), "cuda:0")
                self.assertTrue(running.nodeid.endswith("OldTest::test_with"))

            def test_without(self):
                with self.assertRaisesRegex(RuntimeError, "put @requires_cuda on the test"):
                    pytest_cudaenv.current()
        """
    )
    pytester.runpytest_inprocess("--cuda-simulate", "h100:2").assert_outcomes(passed=2)


def test_getfixturevalue_declares_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_sly(request): request.getfixturevalue('cuda_device')")
    result = pytester.runpytest_inprocess("--cuda-simulate", "h100")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*put @requires_cuda on the test*"])


SEEDED = """
    import random
    import numpy, torch, pytest
    SEEN = {}

    @pytest.mark.parametrize("x", [1, 2])
    def test_numbers(device, x):
        SEEN[x] = (random.random(), numpy.random.rand(), torch.rand(1).item())
        print(f"x{x}", *SEEN[x])

    def test_unseeded(): print("plain", torch.rand(1).item())
"""


def test_each_test_starts_from_a_seed_made_from_its_id(pytester: pytest.Pytester) -> None:
    """The numbers depend on the id: not on order, on what ran before, or on the process."""
    pytester.makepyfile(SEEDED)

    def numbers(*arguments: str) -> dict[str, str]:
        result = pytester.runpytest_subprocess("-s", "--cuda-simulate", "h100", *arguments)
        result.assert_outcomes(passed=len([a for a in arguments if "::" in a]) or 3)
        return dict(re.findall(r"(x[12]) (0[.]\S+ 0[.]\S+ 0[.]\S+)$", result.stdout.str(), re.MULTILINE))

    name = "test_each_test_starts_from_a_seed_made_from_its_id.py"
    whole = numbers()
    assert whole["x1"] != whole["x2"]
    assert numbers(f"{name}::test_numbers[2]")["x2"] == whole["x2"]
    assert numbers(f"{name}::test_numbers[2]", f"{name}::test_numbers[1]") == whole


def test_devices_are_good_wherever_torch_takes_one(pytester: pytest.Pytester) -> None:
    """torch refuses foreign classes; these are strings to it."""
    pytester.makepyfile(
        """
        import torch
        def test_device(cuda_device):
            assert torch.device(cuda_device) == torch.device("cuda", 0)
            assert torch.empty(2, device="meta").to(torch.device("meta")).device.type == "meta"
            with torch.device("meta"):
                assert torch.nn.Linear(1, 1).weight.device.type == "meta"
            mapped = torch.serialization._get_restore_location(cuda_device)
            assert callable(mapped)
            import copy, pickle
            again = pickle.loads(pickle.dumps(cuda_device))
            assert (again, again.uuid, again.index) == (cuda_device, cuda_device.uuid, 0)
            assert copy.deepcopy(cuda_device).uuid == cuda_device.uuid
        """
    )
    pytester.runpytest_subprocess("--cuda-simulate", "h100").assert_outcomes(passed=1)


def test_visible_narrows_what_the_run_could_see(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices count within the outer mask, so that a scheduler's choice can be narrowed and never left."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,1")
    wanted = simulated_host("h100:4").devices
    pytester.makepyfile(
        f"""
        import os
        from pytest_cudaenv import requires_cuda

        @requires_cuda(devices=2)
        def test_mask(cuda_devices):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
            assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            assert [d.uuid for d in cuda_devices] == {[wanted[1].uuid, wanted[2].uuid]!r}
        """
    )
    for arguments in ((), ("-n", "2")):
        run = pytester.runpytest_subprocess("--cuda-simulate", "h100:4", "--cuda-visible", "2,1", *arguments)
        run.assert_outcomes(passed=1)
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100:4", "--cuda-visible", "0,3")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--cuda-visible 0,3: *3 is out of range*choose from: 0 NVIDIA H100*"])


def test_a_broken_package_is_its_own_reason(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, and its import fails: every test says so, also the second, and nothing half-imported stays."""
    site = pytester.mkdir("site")
    package = site / "flash_attn_interface"
    package.mkdir()
    (package / "__init__.py").write_text("import nothing_like_this\n")
    info = site / "flash_attn_3-3.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n")
    pytester.makepyfile(
        """
        import sys
        from pytest_cudaenv import requires_flash_attn3

        @requires_flash_attn3
        def test_first(): raise AssertionError

        @requires_flash_attn3
        def test_second(): raise AssertionError

        def test_nothing_is_left(): assert "flash_attn_interface" not in sys.modules
        """
    )
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    result = pytester.runpytest_subprocess("--cuda-simulate", "h100", "-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED [[]1[]] *[[]attn-broken[]] FA3 *nothing_like_this*"] * 2)


def test_a_device_that_is_present_and_unusable_is_an_error(
    pytester: pytest.Pytester, on_host: Callable[[Host], None]
) -> None:
    """An A100 under a torch that was built for the CPU: no test may go on quietly on the CPU."""
    host = replace(mixed_host(), software=Software(torch=TorchBuild("2.13.0+cpu")))
    on_host(host)
    pytester.makepyfile(
        """
        def test_needs(cuda_device): raise AssertionError
        def test_takes(device): raise AssertionError
        def test_plain(): pass
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*[[]torch-cpu[]] needs a CUDA build of torch; have torch 2.13.0+cpu*"])


def test_a_fixture_of_a_plugin_that_is_switched_off_says_so(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ncuda = false")
    pytester.makepyfile("def test_it(cuda_device): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*`cuda = false` in the ini file switches pytest-cudaenv off*"])
