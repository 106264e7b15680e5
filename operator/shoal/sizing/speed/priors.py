"""What is assumed before anything is measured: every number of the speed model, with where it is from.

Standard deviations are of logarithms unless said otherwise.
"""

from __future__ import annotations

import math

REFERENCE_TFLOPS = 9.3  # P100: data sheets enter as ratios to it
REFERENCE_BANDWIDTH = 732.0
REFERENCE_KERNEL = 1e8  # forward FLOPs of a step for each tensor at which b is quoted

# ln a: 3 ms a step; ln b: seconds per forward FLOP, with a training step of three times the forward pass at 40 % of
# the P100's peak; ln c: 0.15 ms a tensor, a dozen kernel launches of 10 us. CM-DARE's fits with TensorFlow 1.10 are
# 10 ms, 76 % and 0.45 ms (docs/sizing-model.md); one standard deviation covers that and today's compiled steps.
GLOBAL_MEAN = (
    math.log(3e-3),
    math.log(3 / (0.4 * 9.3e12)),
    math.log(1.5e-4),
    math.log(1e-5),
    0.4,
    -0.8,
    0.08,
)
# ln e: 10 us of a core for a sample, decoded and ready; images from JPEG take a hundred times that.
# Then the weight of arithmetic against bandwidth (roofline: between 0 and 1); the logit of the host's part of the
# P100's overheads, which no faster accelerator shortens (a third, by CM-DARE's pair: a tensor costs a K80 twice as
# much, and its sheet is 2.6 times slower); and how much better larger kernels fill an accelerator: their time grows as
# work^0.92, give or take 0.05.
GLOBAL_SIGMA = (1.2, 0.6, 1.2, 2.0, 0.25, 1.0, 0.05)
# How accelerators deviate from their sheets in a, b and c (drivers, clocks, hosts), and the loss over d devices: d^0.14
# give or take d^0.1, since 8 K80 in one machine lose 25.6 % to PCIe by spotDNN. Between K80 and P100 b is off by 0.17;
# spotDNN's four kinds are farther apart (docs/benchmarks/predictor.md).
OWN_SIGMA = (0.25, 0.2, 0.2, 0.1)
DEVICES_LOSS = 0.14
CPU_FACTOR = 4.0  # processors of one name differ by far more than accelerators

ANY_UNIT = 6.0  # of ln b, in tables without batch sizes: FLOPs of a sample or of a step, forward or all
ANY_CONVENTION = 1.3  # of ln b, in tables of a user: multiply-adds or FLOPs, forward pass or training step
CAMPAIGN = 0.03  # the same configuration on another day: 2-5 % on a K80, more on a P100 (CM-DARE, raw runs)
MODEL, BOTH = 0.06, 0.06  # a network, and a network on one accelerator, against the form
OWNER = 0.1  # who measures on an accelerator: the input, and the share of a device that a namespace has, are its own
SMOOTH, SMOOTH_OWN = 0.1, 0.03  # the form itself, far from what was measured
LENGTHS = (2.0, 2.0, 3.0, 1.0, 1.5)  # what is far: ln FLOPs of a step, tensors, parameters, cores, devices
UNKNOWN_FLOPS = 1.0
FLOPS_PER_PARAMETER = 100.0  # between 2 (dense) and 2,000 (early convolutions)
MOST_ITERATIONS = 60

# ln alpha: 20 us a tensor; ln beta: 4 bytes (bfloat16, both ways) at 10 Gbit/s; ln(p - 1); s. CM-DARE's servers took
# 94 us a tensor and 5.5 ns a parameter, and a second server brought at most 70.6 %, 2^0.77: tensors are dealt to
# servers whole, so one of two has 50 to 70 % of the work, which is s from 1 to 0.5.
SERVER_MEAN = (math.log(2e-5), math.log(4 / 1.25e9), math.log(3.0), 0.7)
SERVER_SIGMA = (1.5, 0.7, 0.7, 0.2)
SERVER_MODEL = 0.1  # a network against the form
VOICES = 5.0  # of one owner among several, however many models it has, in what all networks share
LOAD_NOISE = 0.05  # busy seconds per update, on another day
CLUSTER_NOISE = 0.04
SERIES = 0.5  # clusters of one network and accelerator share deviations: k of them weigh as k^0.5

Z90 = 1.6449  # standard deviations to either side of the median that hold 90 %

LEAST_SIGMA = 0.02  # of a measured step time
HALF_LIFE = 30 * 86400.0  # seconds after which a measurement weighs half ...
DRIFT = 0.1  # ... and what a step time drifts in that time: drivers, images, hosts


def weight(age_seconds: float) -> float:
    """What a measurement of this age still counts, 0 to 1."""
    return float(0.5 ** (max(age_seconds, 0.0) / HALF_LIFE))


MOST_ROWS = 600  # configurations that are fitted, where not more are of planned models: 2 s
MOST_PLANNED_ROWS = 1200  # of planned models: 6 s
MOST_CLUSTERS = 300  # and server loads, of other models than planned ones: 0.2 s
MOST_PLANNED_CLUSTERS = 600

# A snapshot: 2 s to begin, 60 MB/s (CM-DARE: 57 MB/s), 1 ms a tensor.
SNAPSHOT_MEDIAN = (2.0, 1 / 60, 1e-3)
SNAPSHOT_SIGMA = (1.0, 1.0, 1.5)
SNAPSHOT_NOISE = 0.08

# What another day or place changes for all times together: one effect that no number of rows of a single day can show,
# so it is stated and not learned. Nominally equal runs of CM-DARE: four of ResNet-15 on a P100 at 20.9 to 25.9 steps/s
# (0.105), 2-5 % between extremes on a K80; 0.075 together, times Student's t with three degrees of freedom over 1.645.
ANOTHER_DAY = 0.1
# Of a store, which differs between places, too, and not only days: a guess, half as much again. Nothing measured stands
# behind it: all snapshots that are known are of one store.
ANOTHER_STORE = 0.15

# A spot pool before anything was seen: the weight of its rate of losses in node-hours (of at least that rate); the part
# of losses that come as shocks, with its weight in losses; the part of the nodes that each takes, with its weight in
# nodes; the part of the time in which the pool is out of stock, with its weight in independent looks; and for how long,
# with its weight in times.
NODE_HOURS, LEAST_RATE = 20.0, 0.01
SHOCK_SHARE, SHOCK_LOSSES = 0.5, 10.0
SHOCK_SIZE, SHOCK_NODES = 0.5, 10.0
OUT_SHARE, LOOKS = 0.05, 4.0
OUT_SECONDS, OUTS = 1800.0, 2.0
# By how much the logarithms of the waits for nodes differ that do come.
START_SIGMA = 0.5
# A pod waits too long for a node after this many times the pool's start-up time.
PATIENCE = 2.0
