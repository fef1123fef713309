"""The watch of a driver that waits two seconds for a constructor, in the process of a guard."""

from tools.checks import driver

driver.HANGS["__init__"], driver.GRACE = 2.0, 5.0
WatchedArm = driver.WatchedArm
