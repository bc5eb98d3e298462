"""FedAvg (McMahan 2017): one model for all, tested as it is. A reference without differential privacy.

Shared: the whole network, extractor and head, dense. Local: nothing. Noised: nothing; --epsilon must be inf. The model is
that of DP-FedAvg-fb without noise and with a clipping bound that is never reached, bit for bit; only the test differs.
"""

from fedmpi.vision.base import NOT_PRIVATE
from fedmpi.vision.methods import dp_fedavg_fb


class Method(dp_fedavg_fb.Method):
    sends = NOT_PRIVATE
    fine_tunes = False
