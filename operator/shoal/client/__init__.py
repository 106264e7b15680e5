"""The Python client: submit a job from a notebook or a script, follow it, load the model. No TensorFlow, no operator.

```python
import shoal

job = shoal.Client().submit("digits.py:job", image="registry.example.com/team/worker:1", workers=4, storage="s3://bucket/runs")
job.follow()
model = job.model()
```
"""

from shoal.client.client import Client
from shoal.client.job import Job

__all__ = ["Client", "Job"]
