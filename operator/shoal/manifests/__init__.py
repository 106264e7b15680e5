"""What the job's objects look like: names, labels and manifests. What is created when is decided in `shoal.policy`."""

from shoal.manifests.objects import Manifest, disruption_budget, pod_group, secret, service
from shoal.manifests.pods import Images, PodFactory, pod

__all__ = ["Images", "Manifest", "PodFactory", "disruption_budget", "pod", "pod_group", "secret", "service"]
