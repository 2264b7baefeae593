/** The entry of the app: background sessions are defined here, since the system starts the app for them without a screen. */

import { defineSessions } from "@muster-fl/device/native";
import { registerRootComponent } from "expo";
import { App } from "./App";
import { background, session } from "./device";

defineSessions(background, session);
registerRootComponent(App);
