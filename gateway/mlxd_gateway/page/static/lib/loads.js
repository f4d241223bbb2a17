// The loads and unloads that this page has asked for, with what they say until they are over.

import { ask, follow } from "./api.js";
import { useCallback, useState } from "./ui.js";

/**
 * A look at the models that is under way when a load ends may be from before; the next is not.
 */
const LOOKS = 2;
const FRESH = { model: null, error: "", busy: false, looks: 0 };

/**
 * @typedef {object} Loads
 * @property {Record<string, {model: any, error: string, busy: boolean, looks: number}>} byName
 *   the last word of each: `model` as a load's last step has it, null before, and again after
 *   `looks` more looks at all models
 * @property {() => void} look to be called for each look at all models
 * @property {(options: {model: string}) => Promise<boolean>} load whether it is ready then
 * @property {(name: string, options: object) => Promise<void>} unload
 * @property {string} news the latest end, for a screen reader
 */

/** @returns {Loads} */
export function useLoads() {
  const [byName, setByName] = useState({});
  const [news, setNews] = useState("");

  const say = useCallback((name, change) => {
    setByName((before) => ({ ...before, [name]: { ...FRESH, ...change } }));
  }, []);

  const look = useCallback(() => setByName(afterLook), []);

  const load = useCallback(async (options) => {
    const name = options.model;
    let model = null;
    say(name, { busy: true });
    try {
      for await (const event of follow("api/load", { body: options })) {
        if (event.name === "model") {
          model = event.data;
          say(name, { model, busy: true });
        }
      }
      say(name, { model, looks: LOOKS });
      setNews(`${name} is loaded.`);
      return true;
    } catch (error) {
      say(name, { error: error.message });
      setNews(`${name} was not loaded. ${error.message}`);
      return false;
    }
  }, []);

  const unload = useCallback(async (name, options) => {
    say(name, { busy: true });
    try {
      const { model } = await ask("api/unload", { body: { model: name, ...options } });
      say(name, { model, looks: LOOKS });
      setNews(`${name} is unloaded.`);
    } catch (error) {
      say(name, { error: error.message });
      setNews(`${name} was not unloaded. ${error.message}`);
    }
  }, []);

  return { byName, load, unload, look, news };
}

/** @returns what is left to say after one more look; the same object where nothing changes */
export function afterLook(byName) {
  if (!Object.values(byName).some(({ looks }) => looks > 0)) {
    return byName;
  }
  const after = Object.entries(byName).map(([name, own]) => {
    const looks = Math.max(own.looks - 1, 0);
    return [name, { ...own, looks, model: own.busy || looks > 0 ? own.model : null }];
  });
  return Object.fromEntries(after);
}

/**
 * @param {Loads} loads
 * @param {any[]} models
 * @returns {[string, {error: string}][]} what failed under a name that is no model's: a folder's
 *   path, an alias
 */
export function unlisted(loads, models) {
  return Object.entries(loads.byName).filter(
    ([name, { error }]) => error && !models.some((model) => model.name === name),
  );
}
