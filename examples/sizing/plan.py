"""From measurements of other models to a plan for one that never ran: `python examples/sizing/plan.py`.

The measurements are CM-DARE's (tests/data/cmdare): workers with one GPU, and clusters of them. Yours take their place.
"""

from pathlib import Path

from shoal.sizing.accelerators import catalogue
from shoal.sizing.plan import Objective, Pool, Problem, Servers, StepWork, explain, plan
from shoal.sizing.predict import tables
from shoal.sizing.predict.cluster_speed import ClusterSpeed
from shoal.sizing.speed.measurements import Model
from shoal.sizing.speed.servers import Cluster, PsModel

DATA = Path(__file__).parents[2] / "tests/data/cmdare"

workers = tables.load(DATA / "worker_speed.csv", "worker-speed", [], catalogue())
clusters = tables.load(DATA / "cluster_speed.csv", "cluster-speed", [DATA / "models.csv"], catalogue())
speed = ClusterSpeed().fit(clusters, workers)

# Of a Keras model these come from `shoal_trainer.features.model_features(model)`. These tables count the operations of
# a whole training step, three times those of the forward pass.
new = Model("new", flops=3 * 1.07e9, parameters=3_900_000, tensors=190)

print("One worker:")
k80, p100, t4 = (speed.workers_.step_seconds(new, name) for name in ("K80", "P100", "T4"))
for name, step in (("K80", k80), ("P100", p100), ("T4", t4)):  # a T4 was never measured: by its data sheet
    print(f"  {name}: {step.mean:.3f} s a step, 90 % between {step.low:.3f} and {step.high:.3f}")

print("P100 workers and parameter servers:")
for count in (8, 16):
    for servers in (1, 2):
        steps, _ = speed.servers_.speed(Cluster(new, count, servers, alone=count / p100.mean, speed=1.0))
        print(f"  {count} and {servers}: {steps:.1f} steps/s")

print("200,000 steps in two hours:")
capacity, sigma = speed.servers_.capacity(new, 1)
servers = Servers(
    counts=(1, 2, 3), price=0.19, sigma=sigma, measured=1,
    model=PsModel(1 / capacity, speed.servers_.sharpness, speed.servers_.scaling),
)  # fmt: skip
pools = [
    Pool(
        name,
        limit,
        price,
        step.mean,
        batch=128,
        step_sigma=step.sigma,
        spot=lost > 0,
        interruptions_per_hour=lost,
    )
    for name, limit, price, step, lost in (
        ("spot-k80", 8, 0.23, k80, 0.08),
        ("spot-p100", 16, 0.52, p100, 0.1),
        ("on-demand-p100", 16, 1.55, p100, 0.0),
    )
]
print(explain(plan(Problem(pools, StepWork(steps=200_000), servers, Objective(deadline=7200)))))
