/** The screen: whether this phone takes part, a session at once, and what the last one came to. */

import { allowSessions, forbidSessions } from "@muster-fl/device/native";
import { useState } from "react";
import { Button, SafeAreaView, Switch, Text } from "react-native";
import { background, examples, session } from "./device";

export function App() {
  const [allowed, setAllowed] = useState(false);
  const [told, setTold] = useState("Nothing has left this phone.");

  async function allow(value: boolean): Promise<void> {
    await (value ? allowSessions(background) : forbidSessions(background));
    setAllowed(value);
  }

  async function takePart(): Promise<void> {
    setTold("At work…");
    const { outcome, reason, task, round, bytes_up } = await session();
    setTold(`${outcome} ${reason} ${task} round ${round}: ${bytes_up} bytes left this phone.`);
  }

  /** A made-up drawing stands for a canvas, which this example leaves out. */
  async function draw(): Promise<void> {
    await examples.add(Float32Array.from({ length: 64 }, () => Math.random()), 7);
    setTold("A drawing was kept on this phone.");
  }

  return (
    <SafeAreaView>
      <Text>Take part in the background, while this phone charges</Text>
      <Switch accessibilityLabel="Take part in the background" value={allowed} onValueChange={(value) => void allow(value)} />
      <Button title="Keep a drawing" onPress={() => void draw()} />
      <Button title="Take part now" onPress={() => void takePart()} />
      <Text accessibilityLiveRegion="polite">{told}</Text>
    </SafeAreaView>
  );
}
