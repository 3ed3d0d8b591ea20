"""Data sets as published, decoded once into uint8 arrays.

Files are looked for in ``$PCX_DATA/<name>/`` and in the platform's cache directory, checked against published checksums,
and decoded into ``$PCX_CACHE`` or the platform's cache directory. Normalisation and augmentation (`pcx.data.augment`)
belong to a task, not to a data set.

>>> digits = load("digits")
>>> digits.train.images.shape, digits.test.labels.shape
((1438, 1, 8, 8), (359,))
"""

from pcx.data import augment as augment
from pcx.data._load import VALIDATION_SEED as VALIDATION_SEED
from pcx.data._load import fetch as fetch
from pcx.data._load import load as load
from pcx.data._load import look_for as look_for
from pcx.data._load import names as names
from pcx.data._load import split_validation as split_validation
from pcx.data._load import status as status
from pcx.data._types import DataError as DataError
from pcx.data._types import DataSet as DataSet
from pcx.data._types import Split as Split
from pcx.data._types import Status as Status
