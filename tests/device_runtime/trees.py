"""Parts of /proc and /sys, as files, of machines that we do not have."""

PLUGGED_LAPTOP = {
    "sys/class/power_supply/AC/type": "Mains\n",
    "sys/class/power_supply/AC/online": "1\n",
    "sys/class/power_supply/BAT0/type": "Battery\n",
    "sys/class/power_supply/BAT0/status": "Not charging\n",
    "sys/class/power_supply/BAT0/capacity": "79\n",
    "sys/class/power_supply/hid-mouse/type": "Battery\n",
    "sys/class/power_supply/hid-mouse/scope": "Device\n",
    "sys/class/power_supply/hid-mouse/status": "Discharging\n",
    "sys/class/power_supply/hid-mouse/capacity": "5\n",
    "sys/class/thermal/thermal_zone0/temp": "45000\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "critical\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "105000\n",
    "sys/class/thermal/thermal_zone0/trip_point_1_type": "passive\n",
    "sys/class/thermal/thermal_zone0/trip_point_1_temp": "95000\n",
    "sys/class/thermal/thermal_zone0/trip_point_2_type": "active\n",
    "sys/class/thermal/thermal_zone0/trip_point_2_temp": "50000\n",
    "sys/class/thermal/thermal_zone1/temp": "80000\n",
    "sys/class/thermal/thermal_zone1/trip_point_0_type": "passive\n",
    "sys/class/thermal/thermal_zone1/trip_point_0_temp": "-274000\n",
    "sys/class/thermal/thermal_zone1/trip_point_1_type": "hot\n",
    "sys/class/thermal/thermal_zone1/trip_point_1_temp": "92500\n",
    "proc/meminfo": "MemTotal:  16000000 kB\nMemAvailable:  2000000 kB\n",
    "proc/loadavg": "0.30 0.50 0.60 2/900 4711\n",
    "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 50 0 50 400 0 0 0 0 0 0\ncpu1 50 0 50 400 0 0 0 0 0 0\nintr 1\n",
    "proc/self/stat": "4711 (a (b) c) R " + "0 " * 10 + "20 10 0 0\n",
    "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    "wlan0 00000000 010200C0 0003 0 0 600 00000000 0 0 0\n"
    "eth0 00000000 010200C0 0003 0 0 100 00000000 0 0 0\n"
    "eth0 000200C0 00000000 0001 0 0 100 00FFFFFF 0 0 0\n",
    "sys/class/net/eth0/type": "1\n",
    "sys/class/net/eth0/device/vendor": "0x8086\n",
    "sys/class/net/wlan0/type": "1\n",
    "sys/class/net/wlan0/uevent": "DEVTYPE=wlan\nINTERFACE=wlan0\n",
    "sys/class/net/wlan0/device/vendor": "0x8086\n",
}

# On the move: the modem alone, over IPv6; no power supply can be read, and no processor times.
PHONE = {
    "sys/class/thermal/thermal_zone0/temp": "39500\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "passive\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "45000\n",
    "proc/meminfo": "MemTotal:  4000000 kB\nMemAvailable:  500000 kB\n",
    "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n",
    "proc/net/ipv6_route": f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 28} 00000400 00000001 00000000 00000003 rmnet0\n"
    f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 00000001 00000000 00200200 lo\n",
    "sys/class/net/rmnet0/type": "519\n",
}

# Powered by a plug without a battery, on wireless; a thermal zone without trip points.
BOARD = {
    "sys/class/power_supply/usb/type": "USB\n",
    "sys/class/power_supply/usb/online": "1\n",
    "sys/class/thermal/thermal_zone0/temp": "55000\n",
    "proc/meminfo": "MemTotal:  1000000 kB\nMemAvailable:  700000 kB\n",
    "proc/loadavg": "3.90 2.00 1.00 2/90 471\n",
    "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\n" + "cpu0 25 0 25 200 0 0 0 0 0 0\n" * 4,
    "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    "wlan0 00000000 010200C0 0003 0 0 600 00000000 0 0 0\n",
    "sys/class/net/wlan0/type": "1\n",
    "sys/class/net/wlan0/phy80211/index": "0\n",
    "sys/class/net/wlan0/device/vendor": "0x1\n",
}


def grow(root, files):
    """Write files under a root, and return the root."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root
