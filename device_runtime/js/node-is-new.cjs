// Exit status 0 where this Node is as new as package.json asks for, else 1.
const { engines } = require("./package.json");
const [major, minor] = engines.node.match(/\d+/g).map(Number);
const [ownMajor, ownMinor] = process.versions.node.split(".").map(Number);
process.exit(ownMajor > major || (ownMajor === major && ownMinor >= minor) ? 0 : 1);
