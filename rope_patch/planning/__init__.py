"""Memory of a fine-tuning step, from the shapes of a model alone: no weights, no GPU.

>>> from rope_patch.planning import plan
>>> planned = plan("Llama-3.1-8B", length=131072, lora_rank=16)
>>> planned.fits(141), planned.fits(80)
(True, False)
>>> [step.option for step in planned.advice(80)]
['--quantization nf4']
"""

from rope_patch.planning.plans import Plan as Plan
from rope_patch.planning.plans import plan as plan
