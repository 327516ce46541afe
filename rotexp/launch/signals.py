from rotexp.signals import Interrupted, StopRequest, interruptible  # moved; removed once nobody imports it
