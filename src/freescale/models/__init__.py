"""Sequence models on jagged batches: HSTU and SASRec encoders, features, attention and losses. No process groups.

These are the building blocks of the built-in models, for custom ones.
"""

from freescale.models.encoders import build_encoder as build_encoder
from freescale.models.feature_embedding import FeatureEmbedding as FeatureEmbedding
from freescale.models.feature_embedding import TableIds as TableIds
from freescale.models.heads import build_heads as build_heads
from freescale.models.heads import multi_task_loss as multi_task_loss
from freescale.models.jagged import JaggedLayout as JaggedLayout
from freescale.models.keyed import Keys as Keys
from freescale.models.protocol import Rows as Rows
from freescale.models.tokens import TokenMap as TokenMap
