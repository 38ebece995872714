"""The names that server and client use in configs, metrics and reports.

==================== =========== ====================================================
name                 where       meaning
==================== =========== ====================================================
``base-version``     config      version of the model in this message
``local-steps``      config      optimizer steps that the work rule asks for
``dispatch-number``  config      how many messages this node was sent, this included:
                                 a key for the random draws of one training
``num-steps``        metrics     optimizer steps done
``samples-processed`` metrics    examples processed (examples times epochs)
``compute-seconds``  report      time spent training (s)
``payload-budget``   config      most bytes of the reply as Flower serializes it;
                                 missing: plain arrays are wanted
``payload-acked``    config      dispatch number of the last payload of this node that
                                 the server took in; 0: none
``payload-series``   config      key of what a node keeps between messages of a run
``payload-seed``     config      of the encoder's random draws
``payload-protect``, config      patterns of arrays, and "sent" or "local":
``-local-keys``,                 see `Treatment`
``-statistics``
``payload-hold``     config      whether to keep this model: a later message may say
                                 only how another one differs from it
``payload-holds``    report      dispatch number of the model that was kept
``payload-residual`` report      dispatch number that the added residual is from; 0:
                                 none was there
``payload-entropy``  report      major format of the entropy coder; 0: there is none
``uplink``           report      measured by the node (B/s)
==================== =========== ====================================================

The report is a `ConfigRecord` under ``"sap"`` in a train reply; it may repeat the
metrics, and echoes ``base-version``.
"""

REPORT_KEY = "sap"
BASE_VERSION = "base-version"
LOCAL_STEPS = "local-steps"
DISPATCH_NUMBER = "dispatch-number"
COMPUTE_SECONDS = "compute-seconds"
NUM_SAMPLES = "samples-processed"
NUM_STEPS = "num-steps"
PAYLOAD_BUDGET = "payload-budget"
PAYLOAD_ACKED = "payload-acked"
PAYLOAD_SERIES = "payload-series"
PAYLOAD_SEED = "payload-seed"
PAYLOAD_PROTECT = "payload-protect"
PAYLOAD_LOCAL_KEYS = "payload-local-keys"
PAYLOAD_STATISTICS = "payload-statistics"
PAYLOAD_RESIDUAL = "payload-residual"
PAYLOAD_ENTROPY = "payload-entropy"
PAYLOAD_HOLD = "payload-hold"
PAYLOAD_HOLDS = "payload-holds"
UPLINK = "uplink"
