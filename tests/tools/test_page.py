"""The page with sliders: what its script plans anywhere, and what a real browser shows of it, is what Python plans."""

from __future__ import annotations

import re
from functools import partial
from importlib.resources import files
from typing import NamedTuple
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from py_mini_racer import MiniRacer

from fn.__main__ import main
from fn.planner import traffic
from fn.planner.efficiency import NCCL, constant, over_tcp
from fn.planner.methods import methods, rows
from fn.planner.network import Cost, Link, network
from fn.planner.predict import Plan, Rates, plan
from fn.planner.recommend import recommend
from fn.tools import page
from fn.tools.plan import MEMORY, about_links

PARAMS = 1_300_000_000
LINE = f"plan --params {PARAMS} --world 64 --per-node 8 --intra 900gbit --inter 10gbit --compute 350ms"
ROW = re.compile(r'<tr data-name="([^"]*)" data-topology="([^"]*)" data-step="([\d.e+-]+)" data-bytes="([\d.e+-]+)"')

DOCUMENT = """
const written = [], location = { hash: "" }, history = { replaceState() {} };
const nothing = () => new Proxy(function () {}, {
  get: (target, name) => name === Symbol.toPrimitive ? () => "" : name === "clientWidth" ? 640 : nothing(),
  set: (target, name, value) => ["innerHTML", "textContent"].includes(name) ? written.push(value) : true,
  apply: nothing,
});
const document = { getElementById: nothing, createElement: nothing, querySelectorAll: () => [] };
const listeners = {}, window = { addEventListener: (name, listener) => { listeners[name] = listener; } };
function URLSearchParams(text) { return text.split("&").map(pair => pair.split("=")); }
function opened(hash) {
  location.hash = hash;
  written.length = 0;
  listeners.hashchange();
  return written.join("\\n");
}
"""
"""A document in which everything is there and nothing happens, but that what is written is kept."""


class Setting(NamedTuple):
    """Where the sliders are; the names are those in the page's address."""

    params: int
    world: int
    node: int
    intra: float
    intraLatency: float
    inter: float
    interLatency: float
    compute: float
    round: int


SOME = [
    Setting(PARAMS, 64, 8, 9e11, 5e-6, 1e8, 3e-5, 0.05, 10),
    Setting(PARAMS, 8, 8, 7.2e12, 5e-6, 1e10, 3e-5, 0.35, 100),  # where compression does not pay
    Setting(10**6, 2, 1, 9e11, 5e-6, 1e10, 1e-2, 0.01, 1),
    Setting(10**9, 64, 2, 9e11, 5e-6, 1e10, 3e-5, 5.0, 33),
    Setting(10**9, 8, 1, 9e11, 5e-6, 1e9, 3e-5, 0.5, 20),  # where published losses say to take rounds
]


def magnitudes(least, most):
    """Return numbers whose logarithms are between these, as a slider's are."""
    return st.floats(least, most).map(lambda power: 10.0**power)


@st.composite
def anywhere(draw):
    """Return a place in the whole range of all sliders."""
    world = draw(st.sampled_from(page.WORLDS))
    return Setting(
        params=draw(st.sampled_from((*page.PARAMS, PARAMS))),
        world=world,
        node=draw(st.sampled_from([node for node in page.NODES if node <= world])),
        intra=draw(magnitudes(8, 13)),
        intraLatency=draw(magnitudes(-7, -2)),
        inter=draw(magnitudes(7, 13)),
        interLatency=draw(magnitudes(-7, 0)),
        compute=draw(magnitudes(-3, 2)),
        round=draw(st.integers(1, 1000)),
    )


def script_of(html: str) -> MiniRacer:
    """Return the page's script, running."""
    engine = MiniRacer()
    engine.eval(DOCUMENT + html.partition("<script>")[2].partition("</script>")[0])
    return engine


def at(setting: Setting) -> str:
    """Return the end of the page's address."""
    return f"#{urlencode(setting._asdict())}"


def planned(
    setting: Setting, *, tensors: int | None = None, width: int = 4, share: float | None = None, transport: str = NCCL,
    **more,
) -> Plan:  # fmt: skip
    inter = Link(Cost(setting.interLatency, setting.inter), efficiency=over_tcp(transport))
    net = network(*setting[1:3], Cost(setting.intraLatency, setting.intra), inter)
    compared = methods(traffic.model(setting.params, tensors, width, share), net, local_steps=setting.round, **more)
    return plan(compared, net, setting.compute, setting.params, memory=MEMORY)


def check(shown: str, made: Plan, ratio: float | None = None) -> None:
    """Fail if what the page shows is not the plan."""
    found = {(name, topology): (float(step), float(size)) for name, topology, step, size in ROW.findall(shown)}
    expected = {(p.method.name, p.method.topology): (p.step, p.method.size) for p in made.predictions}
    assert found == {key: pytest.approx(numbers, rel=1e-9) for key, numbers in expected.items()}
    said = recommend(made, ratio)
    assert "\n".join(said.lines) in shown
    assert said.why in shown
    lines = about_links(made.net)
    assert shown.count("Links between nodes: ") == len(lines)
    assert all(line in shown for line in lines)
    assert "\n".join(f"{c.label}: {c.evidence.words}" for c in said.picks) in shown


@pytest.mark.slow
def test_the_script_plans_as_python_does_on_every_network(tmp_path):
    path = tmp_path / "plan.html"
    main([*LINE.split(), "--html", str(path)])
    assert path.stat().st_size < 1_700_000
    engine = script_of(path.read_text(encoding="utf-8"))

    @settings(max_examples=12)
    @given(anywhere())
    def plans_alike(setting):
        check(engine.call("opened", at(setting)), planned(setting))

    plans_alike()


@pytest.fixture
def few(monkeypatch):
    """Let pages offer few numbers of parameters and ranks, as it takes a while to count everything."""
    for name, offered in (("PARAMS", (10**6, 10**9)), ("WORLDS", (2, 8, 64)), ("NODES", (1, 2))):
        monkeypatch.setattr(page, name, offered)


def test_the_script_plans_for_the_models_and_methods_of_the_flags(few, tmp_path):
    path = tmp_path / "plan.html"
    flags = "--dtype bf16 --tensors 7 --hidden-share 1/4 --bucket 1e6 --interval 4 --local-steps 1 --rank 1/8"
    more = "--density 1/50 --transport gloo --steps-ratio 0.8"
    main([*LINE.split(), *flags.split(), *more.split(), "--html", str(path)])
    of_flags = {"tensors": 7, "width": 2, "share": 0.25, "transport": "gloo", "bucket": 10**6, "interval": 4}
    engine = script_of(path.read_text(encoding="utf-8"))
    for setting in SOME:
        made = planned(setting, **of_flags, rank=1 / 8, density=1 / 50)
        check(engine.call("opened", at(setting)), made, 0.8)


MEASURED = Link(Cost(2e-5, 5e9), {"all_reduce": Cost(1e-5, 4e9), "all_gather": Cost(4e-5, 7e9)})
IN_PARTS = Link(Cost(1e-4, 5e8), {"all_reduce": Cost(1e-4, 4e8)}, constant(1.0, 0.7, "measured"))
WITHOUT_LATENCY = Link(Cost(0.0, 1e9), {"all_reduce": Cost(2e-4, 8e8), "all_gather": Cost(1e-4, 2e9)})
SHAPES = [(1000, 64), *[(64, 64), (64,), (64, 3, 5, 5)] * 30, (7, 1000), (7,)]
LAYERS = traffic.of_shapes(SHAPES, 4, [shape == (64, 64) for shape in SHAPES])


@pytest.mark.parametrize(
    ("net", "local_steps", "model"),
    [
        (network(8, 8, MEASURED), 1, traffic.model(10**7)),
        (network(8, 2, MEASURED, WITHOUT_LATENCY), 30, LAYERS),
        (network(8, 2, MEASURED, WITHOUT_LATENCY), 1, traffic.model(10**7)),
        (network(8, 4, Cost(1e-5, 1e9), MEASURED), 30, traffic.model(10**7)),
        (network(8, 1, IN_PARTS, IN_PARTS), 1, LAYERS),
    ],
)
def test_the_script_opens_with_the_plan_of_the_links_and_the_model_that_were_measured(net, local_steps, model, few):
    """Each collective has a cost of its own then, and coding its seconds; where nothing is slid, it is the plan."""

    def coding(net):
        return {"onebit_adam": 0.01 * net.world, "onebit_adam (two-level)": 0.3, "adamw, int8 gradients": 0.02}

    html = page.write(
        rows(local_steps=max(2, local_steps)), net, model=model, sizes=traffic.model, assumed=str, compute=0.5,
        local_steps=local_steps, rates=Rates(1e11, coding), bucket=traffic.BUCKET,
    )  # fmt: skip
    compared = methods(model, net, local_steps=local_steps)
    made = plan(compared, net, 0.5, model.params, memory=1e11, coding=coding(net))
    check(script_of(html).eval('written.join("\\n")'), made)


@pytest.mark.parametrize("measured", [
    {"own": {"sign_muon": 0.25, "onebit_adam": 0.5}},
    {"steps": {"adamw": 0.9, "adamw, int4 gradients": 0.7, "sign_muon": 0.6, "muloco, int8": 0.55}},
    {"steps": {"adamw": 0.51, "adamw, int4 gradients": 0.7, "sign_muon": 0.6, "muloco, int8": 0.55}},
])  # fmt: skip
def test_the_script_opens_with_what_was_measured_and_slides_to_what_is_predicted(measured, few):
    net, model = network(8, 8, MEASURED), traffic.model(PARAMS)
    planned_ = partial(plan, methods(model, net), net, params=PARAMS, memory=1e11)
    made = planned_(compute=0.5, **measured)
    engine = script_of(page.write(
        rows(), net, model=model, sizes=traffic.model, assumed=str, compute=0.5, local_steps=30, rates=Rates(1e11),
        bucket=traffic.BUCKET, opens=made,
    ))  # fmt: skip
    check(engine.eval('written.join("\\n")'), made)
    slid = Setting(PARAMS, 8, 8, 5e9, 2e-5, 5e9, 2e-5, 0.25, 30)
    check(engine.call("opened", at(slid)), planned_(compute=0.25))


def test_the_page_needs_nothing_from_elsewhere(few, tmp_path):
    path = tmp_path / "plan.html"
    main([*LINE.split(), "--html", str(path)])
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|@import|<link|src=", text)
    assert "COEFFICIENTS" not in text
    assert text.count("<script>") == text.count("</script>") == 1


def test_the_template_names_no_method():
    template = files("fn.tools").joinpath("page.html").read_text(encoding="utf-8")
    for name in {row.name.partition(",")[0] for row in rows()}:
        assert name not in template
