"""`hub_kernels`: Hub kernels turned on and off in a model, with proof of what was replaced.

Strict everywhere: what was to be replaced and is not, is a skip where the kernel is not for this host, an error where
the suite asks for something that is nowhere, and a failure where the kernel breaks its word. No pytest here.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from pytest_cudaenv.host.software import Software, installed_software
from pytest_cudaenv.requirements.hub_kernels import pair_reasons
from pytest_cudaenv.requirements.kernel_sources import Given, HubLayer, LocalLayer, LockedLayer, Source, source, sources
from pytest_cudaenv.requirements.reason import Rank, Reason, brief
from pytest_cudaenv.verdict import kernel_rows
from pytest_cudaenv.verdict.kernel_attention import AttentionKernels
from pytest_cudaenv.verdict.kernel_errors import Diagnosis, HubKernelError, KernelFaultError, Outcome, diagnose
from pytest_cudaenv.verdict.kernel_mapping import mapping_of, mode_named, of_kernels
from pytest_cudaenv.verdict.kernel_report import KernelReport, KernelReportError, Replacement
from pytest_cudaenv.verdict.kernel_rows import places
from pytest_cudaenv.verdict.kernel_state import UNSET, KernelState, Parked, put_back
from pytest_cudaenv.verdict.kernel_tracker import Refused, Tracker

Refuse = Callable[[Sequence[Reason]], NoReturn]
"""Ends the running test as one whose needs are not met."""


class LiveReport(KernelReport):
    """A report whose kernels are in place until its block, or the test, ends."""

    def __init__(self, read: Callable[[], Iterator[Replacement]], end: Callable[[], None], **facts: Any) -> None:
        super().__init__(read, **facts)
        self._end: Callable[[], None] | None = end
        self.check: Callable[[], None] | None = None
        """What has to hold when the block ends without an exception."""

    def end(self) -> None:
        """Take the kernels away again; the report keeps its rows."""
        if self._end is not None:
            self.freeze()
            end, self._end = self._end, None
            end()

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if kind is None and self.check is not None:
            check, self.check = self.check, None
            check()


class HubKernels:
    """The fixture's object: kernels on and off in models of one test."""

    def __init__(
        self,
        refuse: Refuse,
        *,
        kernels: Literal["on", "off"] = "on",
        mapping: Given | None = None,
        mode: Any = None,
        executed: bool | None = None,
        allow_fallback: Collection[str] = (),
        root: Path | None = None,
        parked: Parked | None = None,
        at_hand: Collection[str] = (),
        software: Callable[[], Software] = installed_software,
    ) -> None:
        self.kernels = kernels
        """`on`, or `off`: then `on()` replaces nothing, and its report holds only if no kernel ran."""
        self.mapping = mapping
        self.reports: list[KernelReport] = []
        """Every report of the test, oldest first."""
        self.comparisons: list[dict[str, Any]] = []
        self._refuse = refuse
        self._mode, self._executed, self._allow = mode, executed, allow_fallback
        self._root = root or Path.cwd()
        self._parked = Parked() if parked is None else parked
        self._at_hand = frozenset(at_hand)
        """Repositories that are in the cache, and load without asking the Hub."""
        self._software = software
        self._state: KernelState | None = None
        self._live: list[LiveReport] = []
        self._overrides: dict[str, Path] = {}
        self._stack = ExitStack()

    # The test's state ------------------------------------------------------------------------------------------

    @property
    def state(self) -> KernelState:
        """What the process's kernels were before the test."""
        if self._state is None:
            self._check_pair()
            self._state = KernelState(self._parked)
        return self._state

    def begin(self) -> None:
        """Keep what the process's kernels are now. Refuses the test where no kernel could be used."""
        if self.kernels == "off" and not _imports("kernels"):
            return  # nothing to keep, and nothing to leave
        _ = self.state

    def end(self) -> None:
        """Put everything back as it was before the test; harmless without `begin`."""
        try:
            for report in reversed(self._live):
                report.end()
        finally:
            self._live.clear()
            self._stack.close()
            if self._state is not None:
                self._state.restore()
                self._state = None

    def unproven(self) -> list[KernelReportError | HubKernelError]:
        """After a test that passed: what its reports, or its marker, leave open."""
        found: list[KernelReportError | HubKernelError] = []
        if self._executed is not None and not self.reports:
            text = "marked with hub_kernels, and the test turned no kernel on: call hub_kernels.on(model) or .compare"
            found.append(HubKernelError("kernels-unused", text))
        for report in self.reports:
            check = getattr(report, "check", None)
            if check is not None:
                report.check = None  # type: ignore[attr-defined]
                try:
                    check()
                except (KernelReportError, HubKernelError) as error:
                    found.append(error)
        return found

    def as_data(self) -> dict[str, Any] | None:
        """The test's reports as one, as the ledger carries it; None without any."""
        if not self.reports:
            return None
        last = max(self.reports, key=lambda report: (report.kernels == "on", len(report.replaced)))
        data = last.as_data() | {"reports": len(self.reports)}
        return data | ({"comparisons": self.comparisons} if self.comparisons else {})

    def _check_pair(self) -> None:
        """Refuse where `kernels` and transformers would replace nothing, silently."""
        if self.kernels == "off":
            return
        if not self._parked.is_usable and (reasons := pair_reasons(self._software())):
            self._refuse(reasons)
        self._parked.is_usable = True
        self._check_imported()

    def _check_imported(self) -> None:
        # Both read their variable when they are imported; what it says now does not count.
        from kernels.layer import globals as mapping

        if mapping._DISABLE_KERNEL_MAPPING:
            self._refuse([_off("DISABLE_KERNEL_MAPPING", "kernelize() replaces no layer")])
        hub = sys.modules.get("transformers.integrations.hub_kernels")
        if hub is not None and not getattr(hub, "_kernels_enabled", True):
            self._refuse([_off("USE_HUB_KERNELS", "transformers replaces no layer")])

    def _refuse_worst(self, refused: Sequence[Refused]) -> NoReturn:
        """End the test for the gravest of what went wrong: a failure before an error, an error before a skip."""
        order = (Outcome.FAIL, Outcome.ERROR, Outcome.SKIP)
        diagnosis, place, error = min(refused, key=lambda one: order.index(one[0].outcome))
        others = len({other.layer_name for _, other, _ in refused}) - 1
        subject = place.layer_name + (f" (and {others} other layer names)" if others else "")
        self._end_for(diagnosis, subject, error)

    def _end_for(self, diagnosis: Diagnosis, subject: str, error: BaseException) -> NoReturn:
        if diagnosis.outcome is Outcome.SKIP:
            self._refuse([diagnosis.reason(subject)])
        diagnosis.raise_(subject, error)

    @contextmanager
    def _diagnosed(self, subject: str) -> Iterator[None]:
        """A block whose failures of `kernels` end the test as what they are."""
        try:
            yield
        except (HubKernelError, KernelFaultError):
            raise
        except Exception as error:
            self._end_for(diagnose(error), subject, error)

    @contextmanager
    def _without_hub(self, repos: Collection[str]) -> Iterator[None]:
        """A block that asks the Hub nothing, where the run has downloaded all these repositories already."""
        if not repos or not self._at_hand.issuperset(repos):
            yield
            return
        with self.state.offline():
            yield

    # Where kernels come from -----------------------------------------------------------------------------------

    def local(self, path: str | os.PathLike[str], layer: str) -> LocalLayer:
        """A layer of the kernel in a folder, relative to the rootdir; no build there is an error."""
        folder = self._root / Path(path).expanduser()
        if not folder.is_dir():
            raise HubKernelError("kernels-no-build", f"{folder} is no folder: name a kernel repository")
        return LocalLayer(folder, layer)

    def hub(
        self, name: str, version: int | None = None, revision: str | None = None, trust_remote_code: bool = False
    ) -> HubLayer:
        """A layer of a kernel on the Hub: `hub("org/name:Layer", version=1)`."""
        repo, colon, layer = name.partition(":")
        if not colon or "/" not in repo:
            raise ValueError(f'{name!r}: write "org/name:Layer"')
        return HubLayer(repo, layer, version, revision, trust_remote_code)

    def locked(
        self, name: str, lockfile: str | os.PathLike[str] = "kernels.lock", trust_remote_code: bool = False
    ) -> LockedLayer:
        """A layer at the commit that a `kernels.lock` names, relative to the rootdir: `locked("org/name:Layer")`."""
        repo, colon, layer = name.partition(":")
        if not colon or "/" not in repo:
            raise ValueError(f'{name!r}: write "org/name:Layer"')
        path = self._root / Path(lockfile).expanduser()
        if not path.is_file():
            raise HubKernelError("kernels-lock", f"{path} is not there: write it with `kernels lock`")
        return LockedLayer(repo, layer, path, trust_remote_code)

    def override(self, repo: str, path: str | os.PathLike[str]) -> None:
        """For this test, this kernel of the Hub is the one in a folder, whichever version is asked for."""
        folder = (self._root / Path(path).expanduser()).resolve()
        if not folder.is_dir():
            raise HubKernelError("kernels-local", f"{folder} is no folder: name a kernel repository")
        if ":" in str(folder):
            raise HubKernelError("kernels-local", f"{folder}: LOCAL_KERNELS can name no path with a colon")
        _ = self.state
        if not self._overrides:
            self._stack.enter_context(self._overridden_versions())
        self.state.forget_answers()
        self._overrides[repo] = folder
        kept = [e for e in (self.state.local_kernels or "").split(":") if e and not e.startswith(f"{repo}=")]
        mine = [f"{name}={where}" for name, where in self._overrides.items()]
        os.environ["LOCAL_KERNELS"] = ":".join([*(e for e in kept if e.split("=")[0] not in self._overrides), *mine])

    @contextmanager
    def _overridden_versions(self) -> Iterator[None]:
        """LOCAL_KERNELS does not reach a layer at a version, whose commit is looked up first, on the Hub.

        https://github.com/huggingface/kernels/blob/main/kernels/src/kernels/layer/layer.py (_resolve_revision)
        """
        from kernels.layer import layer

        original = layer.select_revision_or_version

        @functools.wraps(original)
        def select(repo_id: str, **facts: Any) -> Any:
            if repo_id in self._overrides:
                return facts.get("revision") or f"v{facts.get('version')}"
            return original(repo_id, **facts)

        layer.select_revision_or_version = select
        try:
            yield
        finally:
            layer.select_revision_or_version = original

    def require(self, repo: str, version: int | None = None, revision: str | None = None) -> Any:
        """Load a kernel, and return its module; the test is skipped where this host has no build of it."""
        from kernels import get_kernel

        _ = self.state
        with self._diagnosed(repo), self._without_hub([repo]):
            at = {"revision": revision} if revision is not None else {"version": 1 if version is None else version}
            return get_kernel(repo, **at)

    def variants(
        self, kernel: str | os.PathLike[str], version: int | None = None, revision: str | None = None
    ) -> dict[str, str | None]:
        """Each build variant of a kernel -> why it does not suit this host; None: it does. Best first.

        `kernel` is a folder or an `org/name`, which is looked up in overrides, in the cache, and on the Hub.
        """
        _ = self.state
        from kernels import variants as builds

        subject = os.fspath(kernel)
        with self._diagnosed(subject):
            folder = self._folder_of(kernel, version, revision)
            if folder is not None:
                inside = folder / "build" if (folder / "build").is_dir() else folder
                _, trace = builds.resolve_variants(builds.get_variants_local(inside))
            else:
                at = {"revision": revision} if revision is not None else {"version": 1 if version is None else version}
                trace = builds.get_kernel_variants(subject, **at)
        return {one.variant.variant_str: getattr(one, "reason", None) for one in trace}

    def _folder_of(self, kernel: Any, version: int | None, revision: str | None) -> Path | None:
        from pytest_cudaenv.requirements.kernel_builds import cache_folder, local_override

        if not isinstance(kernel, str) or kernel.count("/") != 1 or kernel.startswith((".", "/", "~")):
            folder = self._root / Path(kernel).expanduser()
            if not folder.is_dir():
                raise HubKernelError("kernels-no-build", f"{folder} is no folder: name a kernel repository")
            return folder
        if (override := local_override(kernel, os.environ)) is not None:
            return override
        cache = cache_folder(os.environ)
        stored = None if cache is None else cache / f"kernels--{kernel.replace('/', '--')}"
        if stored is None:
            return None
        ref = stored / "refs" / (revision or f"v{1 if version is None else version}")
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        snapshot = stored / "snapshots" / commit if commit else None
        return snapshot if snapshot is not None and snapshot.is_dir() else None

    # On, off, watched ------------------------------------------------------------------------------------------

    def layers(self, model: Any) -> list[str]:
        """The layer names that a mapping for this model may have."""
        return sorted({place.layer_name for place in places(model)})

    def on(
        self,
        model: Any,
        mapping: Given | None = None,
        mode: Any = None,
        *,
        device: Any = None,
        allow_fallback: Collection[str] = (),
    ) -> LiveReport:
        """Replace a model's layers by kernels until the block, or the test, ends.

        `mapping`: layer name -> kernel; without it the marker's, else transformers' own. Each layer that it names has
        to be replaced, unless it is in `allow_fallback`. `mode`: `training`, `inference`, or one of them with
        `|torch_compile`; without it the model's, which `train()` and `eval()` then switch.
        """
        if self.kernels == "off":
            return self.off(model)
        self._check_pair()
        _ = self.state
        allow = {*self._allow, *([allow_fallback] if isinstance(allow_fallback, str) else allow_fallback)}
        given = self.mapping if mapping is None else mapping
        fixed = self._mode if mode is None else mode
        kind = _device_of(model, device)
        with self._diagnosed("the mapping"):
            repositories = _transformers_mapping(model) if given is None else mapping_of(given, kind.type, self._root)
        tracker = Tracker(self.state, self._refuse_worst, allow=allow, wanted=list(repositories))
        named = [one.repo for one in sources(given or {}) if not isinstance(one, LocalLayer)]

        def replace() -> None:
            from kernels import use_kernel_mapping

            with use_kernel_mapping(repositories, inherit_mapping=False), self._without_hub(named):
                tracker.replace(model, _mode_of(model, fixed), kind)

        tracker.add(model)
        before = {key: place.module.__dict__.get("forward", UNSET) for key, place in tracker.found.items()}
        own_train = model.__dict__.get("train", UNSET)

        def end() -> None:
            tracker.end()
            for key, forward in before.items():
                put_back(tracker.found[key].module, "forward", forward)
            put_back(model, "train", own_train)

        replace()
        report = self._begin(LiveReport(tracker.rows, end, counted=tracker.counted))
        report.modes = tracker.history
        _check_origin(report)
        if fixed is None:
            _follow_mode(model, replace)
        if given is not None and self._executed is not None:
            wanted = [name for name in repositories if name not in allow]
            report.check = lambda: report.assert_replaced(*wanted, executed=bool(self._executed))
        return report

    def off(self, model: Any) -> LiveReport:
        """Take every kernel out of a model, its functions too, until the block, or the test, ends."""
        found = list(places(model))
        before = {id(p.module): (p.module, p.module.__dict__.get("forward", UNSET)) for p in found}
        for place in found:
            place.module.__dict__.pop("forward", None)

        def rows() -> Iterator[Replacement]:
            for place in found:
                yield kernel_rows.row(place)

        def end() -> None:
            for module, forward in before.values():
                put_back(module, "forward", forward)

        return self._begin(LiveReport(rows, end, kernels="off"))

    def _begin(self, report: LiveReport) -> LiveReport:
        self._live.append(report)
        self.reports.append(report)
        return report

    def watch(self, allow_fallback: Collection[str] = ()) -> LiveReport:
        """Watch transformers' own ways to kernels until the block ends: `from_pretrained(use_kernels=True)`,
        `set_use_kernels`, `train()` and `eval()`. A layer that falls back, which they do not say, ends the test.
        """
        if self.kernels == "off":
            raise HubKernelError("kernels-off", "watch() watches kernels, and this is the state kernels-off")
        self._check_pair()
        _ = self.state
        from transformers import modeling_flash_attention_utils as flash
        from transformers.integrations import hub_kernels

        # What an earlier test has loaded, transformers would go on using without asking for it again.
        flash._loaded_implementation = None
        allow = {*self._allow, *([allow_fallback] if isinstance(allow_fallback, str) else allow_fallback)}
        tracker = Tracker(self.state, self._refuse_worst, allow=allow, wanted=None)
        original = hub_kernels._kernels_kernelize

        def kernelize(model: Any, *, mode: Any, device: Any = None, **_: Any) -> Any:
            self.state.keep_model(model)
            tracker.replace(model, mode, _device_of(model, device))
            return model

        hub_kernels._kernels_kernelize = kernelize
        attention = self._stack.enter_context(AttentionKernels(hub_kernels))

        def rows() -> Iterator[Replacement]:
            yield from tracker.rows()
            yield from attention.rows()

        def end() -> None:
            tracker.end()
            attention.end()
            flash._loaded_implementation = None
            hub_kernels._kernels_kernelize = original

        report = self._begin(LiveReport(rows, end))
        report.is_watched = True
        report.modes = tracker.history
        report.check = lambda: _check_watched(report)
        return report

    def attention(self, model: Any, name: str) -> LiveReport:
        """Run a model's attention on a kernel, `org/name` or `org/name@revision`, until the block or the test ends."""
        if self.kernels == "off":
            return self.off(model)
        self._check_pair()
        _ = self.state
        repo, colon, function = name.partition(":")
        if repo.count("/") != 1 or repo.startswith((".", "/", "~")):
            text = f'{name!r} is no kernel of the Hub: write "org/name"; hub_kernels.override gives it a folder'
            raise HubKernelError("kernels-attention-name", text)
        from transformers import modeling_flash_attention_utils as flash
        from transformers.integrations import hub_kernels

        # In transformers 5.22 a load that failed is remembered as one that worked.
        flash._loaded_implementation = None
        before = model.config._attn_implementation
        attention = self._stack.enter_context(AttentionKernels(hub_kernels, function))
        with self._diagnosed(name), self._without_hub([repo.partition("@")[0]]):
            model.set_attn_implementation(name)
        used = model.config._attn_implementation
        if used != name:
            raise KernelFaultError("kernels-attention", f"asked for {name}, and the model uses {used}")
        if not attention.kernels:
            raise KernelFaultError("kernels-attention", f"asked for {name}, and no kernel was loaded")
        if colon and any("flash_attn_varlen_func" in kernel.used for kernel in attention.kernels):
            text = f"{name}: transformers ignores {function}, as the kernel has flash_attn_varlen_func"
            model.set_attn_implementation(before)
            raise HubKernelError("kernels-attention-name", text)

        def end() -> None:
            attention.end()
            flash._loaded_implementation = None
            model.set_attn_implementation(before)

        return self._begin(LiveReport(attention.rows, end))

    # Numbers and claims ----------------------------------------------------------------------------------------

    def compare(
        self,
        model: Any,
        run: Callable[[Any], Any],
        backward: bool = False,
        *,
        mapping: Given | None = None,
        mode: Any = None,
        k: float = 2.0,
        allow_fallback: Collection[str] = (),
    ) -> LiveReport:
        """Run a model with kernels and without, and compare by the parity rule, at most `k` times as far off.

        The reference is the model without kernels, one precision higher; what the model without kernels is off it in
        its own precision is what kernels may be. `run(model)` returns outputs, a scalar loss first for `backward`.
        Every replaced layer has to run; gradients have to be there where they are without kernels.
        """
        from pytest_cudaenv.verdict import kernel_parity as parity

        with self.off(model):
            # Nothing of `on` may be left in the baseline: function kernels are one object for all models.
            reference, baseline = parity.references(model, run, backward)
        with self.on(model, mapping, mode, allow_fallback=allow_fallback) as report:
            candidate = parity.take(model, run, backward)
            if report.kernels == "on":
                report.assert_replaced(executed=report.counted)
        self.comparisons.append(parity.judge(candidate, reference, baseline, k))
        return report

    def check_layer(
        self,
        layer: Source | str,
        like: Any,
        *inputs: Any,
        backward: bool | None = None,
        compile: bool | None = None,
    ) -> dict[str, bool]:
        """Hold a kernel's layer to what it claims, as a module `like` would use it; return the claims.

        `has_backward`: the gradients of the module's own forward are all there, and right. `can_torch_compile`: it
        compiles without a graph break. `backward` and `compile` say what has to be claimed; None: whatever is.
        """
        import copy

        from pytest_cudaenv.verdict import kernel_parity as parity

        _ = self.state
        from kernels.layer.layer import _replace_forward, _validate_layer

        wanted = source(layer, self._root) if isinstance(layer, str) else layer
        with self._diagnosed(str(wanted)):
            repository = of_kernels(wanted)
            cls = repository.load()
            _validate_layer(check_cls=type(like), cls=cls, repo=str(wanted))
        claims = {
            "has_backward": bool(getattr(cls, "has_backward", True)),
            "can_torch_compile": bool(getattr(cls, "can_torch_compile", False)),
        }
        for name, asked in (("has_backward", backward), ("can_torch_compile", compile)):
            if asked and not claims[name]:
                raise KernelFaultError("kernels-claim", f"{wanted} does not claim {name}")
        kernelized = copy.deepcopy(like)
        kernelized.__dict__.pop("forward", None)
        _replace_forward(kernelized, cls)
        plain = copy.deepcopy(like)
        plain.__dict__.pop("forward", None)
        wants_gradients = claims["has_backward"] and backward is not False
        run = parity.applied(inputs)
        reference, baseline = parity.references(plain, run, wants_gradients)
        candidate = parity.take(kernelized, run, wants_gradients)
        self.comparisons.append(parity.judge(candidate, reference, baseline, 2.0, what=str(wanted)))
        if claims["can_torch_compile"] and compile is not False:
            _check_compiles(kernelized, inputs, wanted)
        return claims


def _imports(module: str) -> bool:
    from importlib import import_module

    try:
        import_module(module)
    except Exception:  # DISABLE_KERNEL_MAPPING=true raises ValueError
        return False
    return True


def _off(variable: str, effect: str) -> Reason:
    remedy = f"Unset {variable} before the first import: under it {effect}, silently."
    have = f"{variable} at import"
    return brief("kernels-off", "needs Hub kernels turned on", have, remedy, Rank.MISSING)


def _device_of(model: Any, device: Any) -> Any:
    """The device that kernels are chosen for, as `kernels` names it: the argument's, else that of the weights."""
    from kernels import Device
    from kernels.layer.kernelize import _find_device

    if device is None:
        return _find_device(model)
    return device if isinstance(device, Device) else Device(type=getattr(device, "type", str(device).partition(":")[0]))


def _mode_of(model: Any, mode: Any) -> Any:
    from kernels import Mode

    if mode is None:
        return Mode.TRAINING if model.training else Mode.INFERENCE
    return mode_named(mode)


def _transformers_mapping(model: Any) -> dict[str, Any]:
    """What transformers maps of the layers that the model has."""
    from transformers.integrations.hub_kernels import get_kernel_mapping_transformers

    names = {place.layer_name for place in places(model)}
    return {name: repos for name, repos in get_kernel_mapping_transformers().items() if name in names}


def _follow_mode(model: Any, replace: Callable[[], None]) -> None:
    """Have `train()` and `eval()` choose kernels anew, as transformers does for its own models."""
    train = model.train

    def switched(mode: bool = True) -> Any:
        changed = model.training != mode
        result = train(mode)
        if changed:
            replace()
        return result

    model.__dict__["train"] = switched


def _check_origin(report: KernelReport) -> None:
    """Refuse a kernel whose code does not lie where its repository is: another build with the same id runs."""
    resolved = functools.cache(lambda path: Path(path).resolve())
    for row in report.replaced:
        folder = row.repository if row.repository and os.path.isabs(row.repository) else None
        if folder is not None and row.file and not resolved(row.file).is_relative_to(resolved(folder)):
            raise KernelFaultError("kernels-other-code", f"{row.name} was to run {folder}, and runs {row.file}")


def _check_watched(report: KernelReport) -> None:
    if not report.rows:
        text = "transformers replaced nothing while it was watched: no use_kernels=True, set_use_kernels or kernel name"
        raise HubKernelError("kernels-unused", text)


def _check_compiles(module: Any, inputs: Sequence[Any], wanted: object) -> None:
    import torch

    try:
        torch.compile(module, backend="eager", fullgraph=True)(*inputs)
    except Exception as error:
        told = str(error).strip().splitlines()
        text = f"{wanted} claims can_torch_compile, and breaks the graph: {told[0] if told else type(error).__name__}"
        raise KernelFaultError("kernels-claim", text) from error
    finally:
        torch._dynamo.reset()
