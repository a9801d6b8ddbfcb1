"""Language models: what agents ask through, and the back ends that answer.

The back ends live here rather than in the model service, so that local mode and the service
use the same ones.
"""
